#!/usr/bin/env bash
# The paper's masked-LM pre-training (configs/pretrain.yaml) on all GPUs of this machine, or on the CPU. An unfinished
# run is resumed, a finished one is left alone.
#   bash scripts/pretrain.sh --data data --output runs/tupe_r
#   bash scripts/pretrain.sh --data data --output runs/bert_a --arch bert_a --gpus 4 --seed 2
# The options are those of `tupe pretrain`. It takes PYTHON, else the active environment, else .venv.
set -euo pipefail
source "$(dirname "$0")/python.bash"
exec "$PYTHON" -m tupe pretrain "$@"
