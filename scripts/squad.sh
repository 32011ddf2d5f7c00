#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on SQuAD (configs/squad.yaml). A started run is resumed.
#   bash scripts/squad.sh SQUAD_FOLDER DATA CHECKPOINT SAVE_DIR [fairseq-train options]
#   bash scripts/squad.sh squad corpus-bin runs/tupe_r/checkpoint_last.pt runs/squad --squad-version 2.0 --max-epoch 2
# SQUAD_FOLDER holds train-v1.1.json and dev-v1.1.json (or v2.0), DATA is the pre-training data. SAVE_DIR gets
# checkpoints, scores.json and predictions/ in the official format. See scripts/launch.sh for GPUS, SET, DRY_RUN, ...
set -euo pipefail
if [ $# -lt 4 ]; then sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
squad=$1 data=$2 checkpoint=$3 save_dir=$4
shift 4
launch squad "" "$data" --squad "$squad" --save-dir "$save_dir" \
  --finetune-from-model "$checkpoint" "$@"
