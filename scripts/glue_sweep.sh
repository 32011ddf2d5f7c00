#!/usr/bin/env bash
# The paper's fine-tuning protocol: every GLUE task in glue-bin with 4 learning rates x 5 seeds, then OUT/report. Can be
# killed and started again, also several times at once on the same folder: what is finished is not run again.
#   bash scripts/glue_sweep.sh CHECKPOINT OUT [options of `tupe sweep`, and of fairseq-train for every job]
#   bash scripts/glue_sweep.sh runs/tupe_r/checkpoint_last.pt sweeps/tupe_r --data glue-bin --grid task=RTE --grid seed=1,2
set -euo pipefail
if [ "${1:---help}" = --help ]; then sed -n '2,5s/^# \?//p' "$0"; exit; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "${PYTHON:-$python}" -m tupe sweep --data glue-bin --checkpoint "$1" --output "$2" --report "${@:3}"
