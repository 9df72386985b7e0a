#!/usr/bin/env bash
# From nothing to a drafter that makes SmolLM2-135M-Instruct faster, on two CPU cores. Reads from top to bottom.
#
#   deploy/recipes/smollm2.sh             hours; Ctrl-C at any time, the same command goes on where it stopped
#   QUICK=1 deploy/recipes/smollm2.sh     the same steps in a few minutes, for a poor drafter
#
# WORK is where everything goes: conversations, shards, the run, and in the end run/drafter, a folder that serves:
#   make serve DRAFTER=$WORK/run/drafter
# The committed drafter was trained on conversations that are committed too:
#   CONVERSATIONS=deploy/recipes/smollm2/written/seed-1.jsonl.gz deploy/recipes/smollm2.sh
# Beside the target's own prompts it answers REQUESTS of a grammar (deploy/recipes/smollm2/requests.py), 0 for none.
# For another target: PROFILE (with [capture]), and PROMPTS where the target cannot write its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-.venv/bin/python}
PROFILE=${PROFILE:-deploy/recipes/smollm2/generate.toml}
WORK=${WORK:-${EYAS_HOME:-$HOME/.local/share/eyas}/runs/smollm2-recipe}
PROMPTS=${PROMPTS:-}
OPENERS=${OPENERS:-deploy/recipes/smollm2/openers.txt}
HELD_OUT=${HELD_OUT:-mt_bench,humaneval}
read -ra CONVERSATIONS <<< "${CONVERSATIONS:-$WORK/train.jsonl}"
if [[ ${QUICK:-} ]]; then
  COUNT=${COUNT:-64} REQUESTS=${REQUESTS:-0} HELD_COUNT=${HELD_COUNT:-8} TOKENS=${TOKENS:-96} VOCAB=${VOCAB:-4096} TRAIN=${TRAIN:---minutes 2 --lr 3e-3 --clip 1}
else
  COUNT=${COUNT:-12000} REQUESTS=${REQUESTS:-1700} HELD_COUNT=${HELD_COUNT:-244} TOKENS=${TOKENS:-224} VOCAB=${VOCAB:-12288}
  TRAIN=${TRAIN:---minutes 120 --held-share 0.03 --ttt-steps 3 --lr 3e-3 --clip 1}
fi
mkdir -p "$WORK"
target=$("$PY" -c 'import sys; from server.config import load_profile; print(load_profile(sys.argv[1]).model_path)' "$PROFILE")
name=$("$PY" -c 'import sys; from server.config import load_profile; print(load_profile(sys.argv[1]).target.served_name)' "$PROFILE")
step() { printf '\n== %s\n' "$*" >&2; }
engine() { "$PY" -m server engine --profile "$PROFILE" "$@"; }  # an engine for as long as the command after -- runs
once() {  # each step that has ended leaves a mark, so that the engine is not started for it again
  [[ -e $WORK/.$1 ]] || { "${@:2}"; touch "$WORK/.$1"; }
}

step "1. The target writes conversations: prompts of its own, and its answers, greedy and at a temperature"
if [[ $PROMPTS ]]; then ask=(--prompts "$PROMPTS"); else ask=(--openers "$OPENERS"); fi
[[ ${CONVERSATIONS[0]} != "$WORK/train.jsonl" ]] || once wrote-train engine --drafter none -- \
  "$PY" -m drafter generate --url '{url}' --key-file '{key_file}' --model "$name" --target "$target" \
  --out "$WORK/train.jsonl" --count "$COUNT" --max-tokens "$TOKENS" "${ask[@]}"

if [[ $REQUESTS != 0 && ${CONVERSATIONS[0]} == "$WORK/train.jsonl" ]]; then
  "$PY" deploy/recipes/smollm2/requests.py --count "$REQUESTS" >"$WORK/requests.jsonl"
  once answered-requests engine --drafter none -- \
    "$PY" -m drafter generate --url '{url}' --key-file '{key_file}' --model "$name" --target "$target" \
    --out "$WORK/answers.jsonl" --prompts "$WORK/requests.jsonl" --max-tokens "$TOKENS"
  CONVERSATIONS+=("$WORK/answers.jsonl")
fi

step "2. It answers the benchmarks too: never to be learned from, only to be walked in step 6"
once wrote-held engine --drafter none -- \
  "$PY" -m drafter generate --url '{url}' --key-file '{key_file}' --model "$name" --target "$target" \
  --out "$WORK/held.jsonl" --prompts "$HELD_OUT" --count "$HELD_COUNT" --max-tokens 128 --past 8

step "3. Which tokens may be drafted"
once vocabulary "$PY" -m drafter vocab "${CONVERSATIONS[@]/#/--conversations=}" --held-out "$WORK/held.jsonl" \
  --target "$target" --size "$VOCAB" --out "$WORK/vocab.safetensors"

step "4. The engine reads the conversations, and writes down what it would feed a drafter"
capture() {
  once "captured-$1" engine --capture "$WORK/spool" -- \
    "$PY" -m drafter capture "${@:2}" --url '{url}' --key-file '{key_file}' --dir "$WORK/spool" --out "$WORK/shards-$1"
}
capture train "${CONVERSATIONS[@]}"
capture held "$WORK/held.jsonl"

step "5. Training"
if [[ ! -d $WORK/run/drafter ]]; then
  # shellcheck disable=SC2086 (TRAIN is words)
  "$PY" -m drafter train --shards "$WORK/shards-train" --target "$target" --vocab "$WORK/vocab.safetensors" \
    --out "$WORK/run" $TRAIN
fi

step "6. What an engine would accept, walked on the benchmarks' answers"
for steps in 1 2 3 5; do
  "$PY" -m drafter evaluate --drafter "$WORK/run/drafter" --shards "$WORK/shards-held" --target "$target" \
    --num-steps "$steps"
done

step "7. Done: $WORK/run/drafter. Prove it on an engine:"
echo "  $PY bench/accept_len.py --drafter none --drafter $WORK/run/drafter --prompts mt_bench,humaneval --max-tokens 128"
