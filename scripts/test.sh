#!/usr/bin/env bash
# Checks style and imports, then runs the tests, in the environment of setup.sh.
#   bash scripts/test.sh [--stack train] [arguments of pytest]      train: without fairseq
#   bash scripts/test.sh -k positions -n 0      -n 0: in one process, which --pdb needs
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
source scripts/steps.bash
stack=fairseq
if [ "${1:-}" = --stack ]; then stack=${2:-}; shift $(($# > 1 ? 2 : 1)); fi
run bash scripts/setup.sh --stack "$stack"
venv=.venv; [ "$stack" = fairseq ] || venv=.venv-$stack
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE  # else every process compiles what it imports: 13 s of a processor, not 5, before its first test
python=$venv/bin/python
echo "test: ruff"
run "$python" -m ruff check .
if [ "$stack" = fairseq ]; then  # which has the versions of scripts/requirements.txt: others have other types
  echo "test: mypy"
  run "$python" -m mypy --config-file pyproject.toml
fi
echo "test: import contracts"  # imports from the folder that it is called in
cd scripts
run "../$venv/bin/lint-imports" --config ../pyproject.toml --no-logo --no-cache
cd ..
torch=$("$python" -c 'from importlib import metadata; print(metadata.version("torch"))')
echo "test: pytest on the $stack stack ($("$python" --version), torch $torch)"
tests=("$python" -m pytest -n 2 --durations 15 "$@")
case " $* " in
  # A slow test that hangs fails after an hour (pyproject.toml), with the stacks of its threads, and the others go on.
  *" -m slow "*) tests+=(--dist load) ;;
  # Two files at a time, in the order of the folders: the last ones are quick, so that both processes end together. A test
  # that hangs ends the run after 5 minutes.
  *) tests+=(--dist loadfile --no-loadscope-reorder --max-worker-restart 0 -o faulthandler_timeout=300) ;;
esac
if [ -t 0 ]; then exec "${tests[@]}"; fi  # --pdb reads from the terminal, whose Ctrl-C reaches all processes
run "${tests[@]}"
