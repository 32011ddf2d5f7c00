# Sourced by the recipes: starts fairseq-train with a recipe of configs/ on all GPUs of one or more nodes, or on the CPU.
#   launch RECIPE "HYDRA OVERRIDES" DATA [fairseq-train options]
# GPUS          GPUs of this node (default: all visible; 0 = CPU)
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for several nodes (default: 1, 0, localhost, 29500)
# SET           more Hydra overrides of the recipe, for what no option says: SET=common.fp16=false
# PYTHON        interpreter (default: .venv of this repository if there is one, else python3)
# ALLOCATOR     library to take main memory from, or none (default: tcmalloc, on machines that have it and no GPU)
# DRY_RUN=1     prints the command and does not run it
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
fi

# glibc returns a step's memory to the system, which clears every page anew for the next one; what that costs on a CPU is
# in docs/performance.md.
if [ -z "${ALLOCATOR:-}" ] && [ ! -e /dev/nvidiactl ]; then
  ALLOCATOR=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2> /dev/null | awk '/libtcmalloc(_minimal)?\.so/ {path = $NF} END {print path}') || true
fi
if [ -n "${ALLOCATOR:-}" ] && [ "$ALLOCATOR" != none ] && [ -z "${LD_PRELOAD:-}" ]; then
  [ -e "$ALLOCATOR" ] || { echo "launch: no such library: ALLOCATOR=$ALLOCATOR" >&2; exit 2; }
  echo "launch: memory from $ALLOCATOR" >&2
  export LD_PRELOAD=$ALLOCATOR
fi

launch() {
  local recipe=$1 overrides=$2 gpus processes cpu="" words arguments command
  shift 2
  gpus=${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
  if [ "$gpus" -eq 0 ] && [ "${NNODES:-1}" -gt 1 ]; then
    echo "launch: NNODES=$NNODES needs GPUs, and GPUS is 0 here" >&2
    return 2
  fi
  processes=$(( (gpus > 0 ? gpus : 1) * ${NNODES:-1} ))
  [ "$gpus" -gt 0 ] || cpu=--cpu
  # shellcheck disable=SC2086  # overrides are words
  words=$("$PYTHON" "$root/scripts/recipe.py" "$recipe" --processes "$processes" $cpu ${DRY_RUN:+--dry-run} \
    --set $overrides ${SET:-} -- "$@" --user-dir "$root/tupe")
  readarray -t arguments <<< "$words"
  command=("$PYTHON")
  if [ "$processes" -gt 1 ]; then
    command+=(-m torch.distributed.run --nproc-per-node "$gpus" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}"
              --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}")
  fi
  command+=(-m fairseq_cli.train "${arguments[@]}")
  printf '%q ' "${command[@]}"; echo
  [ -n "${DRY_RUN:-}" ] || "${command[@]}"
}
