#!/usr/bin/env bash
# A drafter for Kimi-K2.5 out of the one for Kimi-K2, and one from scratch beside it, on eight GPUs; which is better is
# for the bench to say. Reads from top to bottom; each step that has ended is not done again, and those that were
# interrupted go on, so Ctrl-C is safe at any time.
#
#   TARGET=/models/Kimi-K2.5-NVFP4 K2=/drafters/Kimi-K2-Instruct-eagle3 PROMPTS=prompts.jsonl HELD_OUT=held.jsonl \
#     deploy/recipes/kimi_k25.sh
#
# TARGET and K2 are folders: the checkpoint that the profiles serve, and the drafter to reuse. PROMPTS is what your users
# ask (JSON lines, a hundred thousand and more), HELD_OUT some hundred more that are never learned from. WORK is where
# everything goes: in the end WORK/bench/report.html and the gate's word, WORK/finetune/drafter and WORK/scratch/drafter.
#
# Writing, reading and serving want different engines of one target, so the profiles are three. For another target give
# others: the tests run this very script on a tiny Kimi with theirs.
set -euo pipefail
cd "$(dirname "$0")/../.."
set -a  # what follows is also for the commands that an engine runs
PY=${PY:-.venv/bin/python}
GENERATE=${GENERATE:-deploy/profiles/kimi-k2.5-generate-8xb200.toml}
CAPTURE=${CAPTURE:-deploy/profiles/kimi-k2.5-capture-8xb200.toml}
SERVE=${SERVE:-deploy/profiles/kimi-k2.5-nvfp4-8xb200.toml}
WORK=${WORK:-${EYAS_HOME:-$HOME/.local/share/eyas}/runs/kimi-k2.5-recipe}
TARGET=${TARGET:?the folder of the target} K2=${K2:?the folder of the drafter to reuse}
PROMPTS=${PROMPTS:?a file of prompts to learn from} HELD_OUT=${HELD_OUT:?a file of prompts to measure on}

COUNT=${COUNT:-200000}            # prompts, answered greedily once and at 0.7 once
TOKENS=${TOKENS:-2048}            # longest answer, its thinking included
THINKING=${THINKING:-on}
MAX_TOKENS=${MAX_TOKENS:-300000000} MAX_GB=${MAX_GB:-6000}  # never more, whatever COUNT says: 57 KB of features a token
AT_ONCE=${AT_ONCE:-256}           # requests that the writing engine works on
HELD_COUNT=${HELD_COUNT:-200} HELD_TOKENS=${HELD_TOKENS:-512}
STEPS=${STEPS:-3}                 # draft steps, as served
VOCAB=${VOCAB:-32000}
INIT=${INIT:-scaled}              # how rows of tokens that the K2 drafter cannot say are made; remap recommends one
PROBED=${PROBED:-64}              # training prompts on which the K2 drafter is served, to compare with its walk
NPROC=${NPROC:-8}                 # training processes, one for each GPU
TRAIN=${TRAIN:---epochs 1 --batch-tokens 65536 --accumulate 2 --eval-every 200 --device cuda}  # the same for both
FINETUNE=${FINETUNE:-} SCRATCH=${SCRATCH:-}                       # and what is for one of them alone
POLICY=${POLICY:-deploy/recipes/kimi_k25/policy.toml}

mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
name=$("$PY" -c 'import sys; from server.config import load_profile; print(load_profile(sys.argv[1]).target.served_name)' "$GENERATE")
step() { printf '\n== %s\n' "$*" >&2; }
engine() { "$PY" -m server engine "$@"; }  # an engine for as long as the command after -- runs
once() {  # each step that has ended leaves a mark, so that no engine is started for it again
  [[ -e $WORK/.$1 ]] || { "${@:2}"; touch "$WORK/.$1"; }
}
bench() { "$PY" bench/accept_len.py --profile "$SERVE" --num-steps "$STEPS" --thinking "$THINKING" "$@"; }

step "1. The target answers: prompts to learn from; a few of them, and those to measure on, with tokens past each answer"
[[ -e $WORK/few.jsonl ]] || head -n "$PROBED" "$PROMPTS" >"$WORK/few.jsonl"
answers() {  # URL KEY_FILE
  ask=("$PY" -m drafter generate --url "$1" --key-file "$2" --model "$name" --target "$TARGET" --thinking "$THINKING"
    --concurrency "$AT_ONCE")
  "${ask[@]}" --prompts "$PROMPTS" --count "$COUNT" --max-tokens "$TOKENS" --max-total-tokens "$MAX_TOKENS" \
    --out "$WORK/train.jsonl"
  "${ask[@]}" --prompts "$WORK/few.jsonl" --max-tokens "$TOKENS" --past 8 --out "$WORK/probed.jsonl"
  "${ask[@]}" --prompts "$HELD_OUT" --count "$HELD_COUNT" --max-tokens "$HELD_TOKENS" --past 8 --out "$WORK/held.jsonl"
}
once wrote engine --profile "$GENERATE" --drafter none -- bash -euc 'answers "$@"' - '{url}' '{key_file}'

step "2. An engine reads the answers, and writes down what it would feed a drafter"
features() {  # URL KEY_FILE
  for set in train probed held; do
    "$PY" -m drafter capture "$WORK/$set.jsonl" --url "$1" --key-file "$2" --target "$TARGET" --dir "$WORK/spool" \
      --out "$WORK/shards-$set" --max-gb "$MAX_GB"
  done
}
once captured engine --profile "$CAPTURE" --capture "$WORK/spool" -- bash -euc 'features "$@"' - '{url}' '{key_file}'

step "3. What the K2 drafter accepts as it is, on the few"
# Before the first step of training it is walked over the shards of these very answers: where that is not what it reached
# when it was served, training does not see what serving sees (layer ids, norms, positions, map), and nothing is trained.
once served-k2 bench --drafter "$K2" --baseline "$K2" --prompts "$WORK/few.jsonl" --max-tokens "$TOKENS" \
  --out "$WORK/served-k2"

step "4. Which tokens may be drafted, and how that differs from what the K2 drafter can say"
once vocabulary "$PY" -m drafter vocab --conversations "$WORK/train.jsonl" --held-out "$WORK/held.jsonl" \
  --target "$TARGET" --size "$VOCAB" --out "$WORK/vocab.safetensors"
"$PY" -m drafter diff "$K2" "$WORK/vocab.safetensors" --target "$TARGET"

step "5. Its rows moved to that vocabulary; those of tokens that it never knew are made from the target's head"
[[ -d $WORK/remapped ]] || "$PY" -m drafter remap "$K2" --vocab "$WORK/vocab.safetensors" --verifier "$TARGET" \
  --init "$INIT" --out "$WORK/remapped"

step "6. Training: the remapped drafter, and one from scratch"
train() {
  [[ -d $WORK/$1/drafter ]] || {
    launch=("$PY" -m drafter)
    [[ $NPROC -eq 1 ]] || launch=("$PY" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m drafter)
    # shellcheck disable=SC2086 (TRAIN is words)
    "${launch[@]}" train --shards "$WORK/shards-train" --shards "$WORK/shards-probed" --target "$TARGET" \
      --out "$WORK/$1" --name "$1" $TRAIN "${@:2}"
  }
}
# shellcheck disable=SC2086 (so are these)
train finetune --from "$WORK/remapped" --vocab "$WORK/vocab.safetensors" --remapped-from "$K2" \
  --probe "$WORK/served-k2/report.json" $FINETUNE
# shellcheck disable=SC2086
train scratch --vocab "$WORK/vocab.safetensors" $SCRATCH
"$PY" -m drafter verdict "$WORK/finetune/log.jsonl" --baseline "$WORK/scratch/log.jsonl" --plot "$WORK/curves.svg" \
  || [[ $? -ge 3 ]]  # continue and stop are verdicts too; the bench has the last word

step "7. What an engine would accept, walked on answers that neither has seen"
for drafter in "$WORK/remapped" "$WORK/finetune/drafter" "$WORK/scratch/drafter"; do
  echo "$drafter"
  "$PY" -m drafter evaluate --drafter "$drafter" --shards "$WORK/shards-held" --target "$TARGET" --num-steps "$STEPS"
done

step "8. What an engine does accept: none, the K2 drafter as it is, and all that became of it"
once measured bench --drafter none --drafter "$K2" --drafter "$WORK/remapped" --drafter "$WORK/finetune/drafter" \
  --drafter "$WORK/scratch/drafter" --prompts "$HELD_OUT" --limit "$HELD_COUNT" --max-tokens "$HELD_TOKENS" \
  --out "$WORK/bench"

step "9. May one be promoted? The better of the two is held against the policy"
best=$("$PY" - "$WORK/bench/report.json" <<'END'
import json, sys
variants = {v["drafter"]: v.get("acceptance_length", 0.0) for v in json.load(open(sys.argv[1]))["variants"]}
print(max((name for name in variants if name.endswith("/drafter")), key=variants.__getitem__))
END
)
{ printf 'drafter = "%s"\n' "$best"; grep -v '^drafter' "$POLICY"; } >"$WORK/policy.toml"
"$PY" -m bench.gate "$WORK/bench/report.json" --policy "$WORK/policy.toml"
