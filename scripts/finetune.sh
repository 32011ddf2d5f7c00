#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on one GLUE task (configs/finetune.yaml: Table 2 of the paper). A started run is resumed.
#   bash scripts/finetune.sh TASK DATA CHECKPOINT SAVE_DIR [fairseq-train options]
#   bash scripts/finetune.sh RTE glue-bin runs/tupe_r/checkpoint_last.pt runs/rte --lr 2e-5 --seed 3
# DATA is the folder that prepare_glue.py wrote. Architecture and longest sequence are the checkpoint's. SAVE_DIR gets
# checkpoint_best.pt, checkpoint_last.pt, scores.json (unrounded, every epoch) and predictions/. See scripts/launch.sh for
# GPUS, SET, DRY_RUN, ...
set -euo pipefail
if [ $# -lt 4 ]; then sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
task=$(tr -dc '[:alnum:]' <<< "${1,,}") data=$2 checkpoint=$3 save_dir=$4
shift 4
launch finetune "glue=$task" "$data" --save-dir "$save_dir" --finetune-from-model "$checkpoint" \
  "$@"
