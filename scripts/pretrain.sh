#!/usr/bin/env bash
# The paper's masked-LM pre-training (configs/pretrain.yaml) on all GPUs of this machine, or on the CPU. An unfinished
# run is resumed, a finished one is left alone.
#   bash scripts/pretrain.sh --data data --output runs/tupe_r
#   bash scripts/pretrain.sh --data data --output runs/bert_a --arch bert_a --gpus 4 --seed 2
# The options are those of `tupe pretrain`; PYTHON is the interpreter (default: .venv of this repository).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
command -v "${PYTHON:=$root/.venv/bin/python}" > /dev/null ||
  { echo "${0##*/}: $PYTHON not found; scripts/setup.sh makes the environment" >&2; exit 2; }
exec "$PYTHON" -m tupe pretrain "$@"
