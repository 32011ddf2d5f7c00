#!/usr/bin/env bash
# Continued training of a swapped checkpoint (tupe checkpoint swap), after Wang et al. (2021; configs/continue.yaml):
# 5 epochs at length 128, then 2 at length 512. A started run is resumed.
#   bash scripts/continue.sh DATA CHECKPOINT SAVE_DIR [fairseq-train options for both phases]
# Writes SAVE_DIR/short and SAVE_DIR/long. EPOCHS="5 2" and LENGTHS="128 512" can be changed. With the next-sentence objective
# (the checkpoint needs segment embeddings): NEXT_SENTENCE=1. See scripts/launch.sh for GPUS, SET, DRY_RUN, ...
set -euo pipefail
if [ $# -lt 3 ]; then sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
data=$1 checkpoint=$2 save_dir=$3
shift 3
read -r -a epochs <<< "${EPOCHS:-5 2}"
read -r -a lengths <<< "${LENGTHS:-128 512}"
objective=""
[ -z "${NEXT_SENTENCE:-}" ] || objective="task.next_sentence=true criterion._name=masked_lm_next_sentence"
for phase in 0 1; do
  folder=$save_dir/$( [ $phase = 0 ] && echo short || echo long )
  launch continue "$objective" "$data" --save-dir "$folder" --finetune-from-model "$checkpoint" \
    --tokens-per-sample "${lengths[$phase]}" --max-epoch "${epochs[$phase]}" "$@"
  checkpoint=$folder/checkpoint_last.pt
done
