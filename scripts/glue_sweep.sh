#!/usr/bin/env bash
# The paper's fine-tuning protocol: each GLUE task with 4 learning rates x 5 seeds, then the table. Can be killed and
# started again, also several times at once on the same folder: a job that is done is not run again.
#   DATA=glue-bin bash scripts/glue_sweep.sh CHECKPOINT OUT [TASK ...]        (default: all tasks in DATA)
# DATA          folder that prepare_glue.py wrote (default: glue-bin)
# JOBS          processes at a time (default: one per GPU, or one on a CPU)
# LRS, SEEDS    other values, e.g. SEEDS="1 2"
# OPTIONS       more fairseq-train options for every job
# KEEP_BEST=1   keeps the best checkpoint of each task (otherwise none is left); RETRY_FAILED=1 runs failed jobs again
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
status=0
"$PYTHON" "$root/scripts/sweep_glue.py" "$@" --data "${DATA:-glue-bin}" ${JOBS:+--jobs "$JOBS"} ${LRS:+--lrs $LRS} \
  ${SEEDS:+--seeds $SEEDS} ${OPTIONS:+--options="$OPTIONS"} ${KEEP_BEST:+--keep-best} ${RETRY_FAILED:+--retry-failed} || status=$?
"$PYTHON" "$root/scripts/collect.py" "$2" --output "$2/report"
exit $status
