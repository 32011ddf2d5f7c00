#!/usr/bin/env bash
# Style, imports, then the tests, in the environment that setup.sh makes. Arguments go to pytest: bash scripts/test.sh -k positions
# STACK=volta runs the same tests on the second stack; -n 0 runs them one after the other, as --pdb needs it.
set -euo pipefail
cd "$(dirname "$0")/.."
stack=${STACK:-current}
bash scripts/setup.sh --stack "$stack"
venv=.venv; [ "$stack" = current ] || venv=.venv-$stack
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
echo "test: ruff"
"$venv/bin/python" -m ruff check .
echo "test: which module may import which"
"$venv/bin/lint-imports" --no-logo --no-cache
echo "test: pytest on the $stack stack ($("$venv/bin/python" --version), torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)'))"
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"  # two files at a time
