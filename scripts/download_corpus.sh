#!/usr/bin/env bash
# Downloads real English text (a Wikipedia sample, books, speeches, reviews: about 95 MB) as input for `tupe prepare corpus`.
#   bash scripts/download_corpus.sh --output FOLDER [--kinds wiki,books,speeches,reviews]
# The options are those of `tupe download`; PYTHON is the interpreter (default: .venv of this repository).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
command -v "${PYTHON:=$root/.venv/bin/python}" > /dev/null ||
  { echo "${0##*/}: $PYTHON not found; scripts/setup.sh makes the environment" >&2; exit 2; }
exec "$PYTHON" -m tupe download "$@"
