#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on a GLUE task, with the paper's settings (configs/finetune.yaml). An
# unfinished run is resumed, a finished one is left alone.
#   bash scripts/finetune.sh --task RTE --data glue-bin --checkpoint runs/tupe_r/checkpoint_last.pt --output runs/rte --lr 2e-5
# The options are those of `tupe finetune`; PYTHON is the interpreter (default: .venv of this repository).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
command -v "${PYTHON:=$root/.venv/bin/python}" > /dev/null ||
  { echo "${0##*/}: $PYTHON not found; scripts/setup.sh makes the environment" >&2; exit 2; }
exec "$PYTHON" -m tupe finetune "$@"
