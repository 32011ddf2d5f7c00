# For scripts that source this: which Python runs them. PYTHON; else that of the active environment, venv or conda; else the one
# that setup.sh makes. It imports this repository.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
# Every shell may begin in conda's base environment: nobody chose it if there is another.
if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-}" = base ] && [ -d "$root/.venv" ]; then active=; fi
PYTHON=${PYTHON:-${active:-$root/.venv}/bin/python}
command -v "$PYTHON" > /dev/null ||
  { echo "${0##*/}: $PYTHON not found; scripts/setup.sh makes the environment" >&2; exit 2; }
echo "${0##*/}: running $PYTHON" >&2
