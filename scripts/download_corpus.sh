#!/usr/bin/env bash
# Downloads real English text (a Wikipedia sample, books, speeches, reviews: about 95 MB) as input for `tupe prepare corpus`.
#   bash scripts/download_corpus.sh FOLDER [--kinds wiki,books,speeches,reviews]
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,3s/^# \?//p' "$0"; exit ;; esac
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,3s/^# \?//p' "$0" >&2; exit 2; }
python=${PYTHON:-$here/../.venv/bin/python}; [ -x "$python" ] || python=python3
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m tupe download --output "$@"
