#!/usr/bin/env bash
# The paper's fine-tuning protocol: every prepared GLUE task with 4 learning rates x 5 seeds, then OUTPUT/report. Can be
# killed and started again, also several times at once on the same folder: what is finished is not run again.
#   bash scripts/glue_sweep.sh --checkpoint runs/tupe_r --output sweeps/tupe_r --data glue-bin
#   bash scripts/glue_sweep.sh --checkpoint FILE --output FOLDER --data glue-bin --grid task=RTE --grid seed=1,2
# The options are those of `tupe sweep` and `tupe finetune`. It takes PYTHON, else the active environment, else .venv.
set -euo pipefail
source "$(dirname "$0")/python.bash"
exec "$PYTHON" -m tupe sweep --report "$@"
