#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on a GLUE task, with the paper's settings (configs/finetune.yaml). An
# unfinished run is resumed, a finished one is left alone.
#   bash scripts/finetune.sh --task RTE --data glue-bin --checkpoint runs/tupe_r --output runs/rte --lr 2e-5
# The options are those of `tupe finetune`. It takes PYTHON, else the active environment, else .venv.
set -euo pipefail
source "$(dirname "$0")/python.bash"
exec "$PYTHON" -m tupe finetune "$@"
