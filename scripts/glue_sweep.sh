#!/usr/bin/env bash
# The paper's fine-tuning protocol: every prepared GLUE task with 4 learning rates x 5 seeds, then OUTPUT/report. Can be
# killed and started again, also several times at once on the same folder: what is finished is not run again.
#   bash scripts/glue_sweep.sh --checkpoint runs/tupe_r/checkpoint_last.pt --output sweeps/tupe_r --data glue-bin
#   bash scripts/glue_sweep.sh --checkpoint FILE --output FOLDER --data glue-bin --grid task=RTE --grid seed=1,2
# The options are those of `tupe sweep` and `tupe finetune`; PYTHON is the interpreter (default: .venv of this repository).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
command -v "${PYTHON:=$root/.venv/bin/python}" > /dev/null ||
  { echo "${0##*/}: $PYTHON not found; scripts/setup.sh makes the environment" >&2; exit 2; }
exec "$PYTHON" -m tupe sweep --report "$@"
