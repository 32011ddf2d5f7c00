#!/usr/bin/env bash
# The paper's masked-LM pre-training (configs/pretrain.yaml) through fairseq-train. A started run is resumed.
#   bash scripts/pretrain.sh DATA SAVE_DIR [fairseq-train options]
#   ARCH=bert_a bash scripts/pretrain.sh DATA SAVE_DIR --seed 2                     # default: the recipe's, tupe_r
#   RECIPE=pretrain_electra ARCH=electra_tupe_r bash scripts/pretrain.sh DATA SAVE_DIR           # another file of configs/
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/pretrain.sh DATA SAVE_DIR      # the same on node 1 with NODE_RANK=1
# The batch of 256 sequences is kept whatever the number of GPUs; --batch-size is the most that one GPU takes at a time.
# Mixed precision is --fp16; give --amp or --autocast bf16 for another. See scripts/launch.sh for GPUS, SET, DRY_RUN, ...
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,8s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
data=$1 save_dir=$2
shift 2
launch "${RECIPE:-pretrain}" "${ARCH:+model._name=$ARCH}" "$data" --save-dir "$save_dir" "$@"
