#!/usr/bin/env bash
# Encodings side by side: pre-trains every preset alike, fine-tunes each on GLUE and SQuAD, and collects one report with the
# scores, the properties of the encodings and their correlations. By default the thirteen of Wang et al. (2021). Can be
# killed and started again.
#   GLUE=glue-bin SQUAD=squad bash scripts/compare_encodings.sh DATA OUT [fairseq-train options of the pre-training]
# PRESETS       files of configs/model (default: wang_*)
# SIZE          of the models (default: tiny)
# GLUE, SQUAD   folder that prepare_glue.py wrote; folder of the official SQuAD files. What is not given is left out.
# SET           overrides of the pre-training's recipe
# TASKS, LRS, SEEDS, OPTIONS   of the fine-tuning, as for glue_sweep.sh (default: all tasks, 5e-5, "1 2 3", none);
#               SQuAD takes the first of LRS
# VERSIONS      of SQuAD (default: "1.1 2.0")
# JOBS          processes at a time (default: 1)
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,14s/^# \?//p' "$0" >&2; exit 2; fi
source "$(dirname "$0")/launch.sh"
export PYTHON
data=$1 out=$2 scripts=$root/scripts
shift 2
presets=${PRESETS:-$(cd "$root/configs/model" && printf '%s\n' wang_*.yaml | sed 's/\.yaml$//')}
for preset in $presets; do
  if [ ! -e "$root/configs/model/$preset.yaml" ]; then
    echo "compare: unknown preset '$preset'; valid: $(cd "$root/configs/model" && echo *.yaml | sed 's/\.yaml//g')" >&2
    exit 2
  fi
done
jobs=${JOBS:-1} seeds=${SEEDS:-1 2 3} rate=${LRS:-5e-5}
failed=0

declare -A slot_of=()  # process -> its place among those that run
devices=()  # one GPU for each of several jobs; a job that is alone takes all
if [ "$jobs" -gt 1 ]; then
  gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  [ "$gpus" -eq 0 ] || IFS=, read -ra devices <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
fi

limited() {  # run a command in the background, $jobs at a time, with its output in $1
  local log=$1 slot=0 gpu=()
  shift
  while [ "${#slot_of[@]}" -ge "$jobs" ]; do reap; done
  while [[ " ${slot_of[*]} " == *" $slot "* ]]; do slot=$((slot + 1)); done
  [ "${#devices[@]}" -eq 0 ] || gpu=(env GPUS=1 CUDA_VISIBLE_DEVICES="${devices[slot % ${#devices[@]}]}")
  mkdir -p "$(dirname "$log")"
  echo "compare: $(dirname "$log")"
  start "${gpu[@]}" "$@" >> "$log" 2>&1
  slot_of[$!]=$slot
}
start() {  # in the background, in a process group of its own, to stop all of it
  set -m
  "$@" &
  set +m
}
reap() {  # wait until one of them is over
  local count=${#slot_of[@]} pid
  while [ "${#slot_of[@]}" -eq "$count" ]; do
    sleep 0.2
    for pid in "${!slot_of[@]}"; do
      ! kill -0 "$pid" 2> /dev/null || continue
      wait "$pid" || failed=$((failed + 1))
      unset "slot_of[$pid]"
    done
  done
}
end() { for pid in "${!slot_of[@]}"; do kill -- "-$pid" 2> /dev/null || true; done; }
trap end EXIT
trap 'exit 130' INT TERM
finish() { while [ "${#slot_of[@]}" -gt 0 ]; do reap; done; }

[ "$jobs" -eq 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for preset in $presets; do
  # fairseq would add an update (of learning rate 0) to a run that is over, and then it is another model for the sweeps
  ! grep -qs "done training" "$out/$preset/pretrain.log" || continue
  name=$(sed -n 's/^_name: *//p' "$root/configs/model/$preset.yaml")
  limited "$out/$preset/pretrain.log" env SET="model=$preset ${SET:-}" ARCH="${name}_${SIZE:-tiny}" \
    bash "$scripts/pretrain.sh" "$data" "$out/$preset/pretrain" "$@"
done
finish
trained=()
for preset in $presets; do
  if grep -qs "done training" "$out/$preset/pretrain.log"; then trained+=("$preset"); fi
done
for preset in "${trained[@]}"; do
  [ -n "${GLUE:-}" ] || break
  # shellcheck disable=SC2086  # TASKS are words
  start env DATA="$GLUE" LRS="$rate" SEEDS="$seeds" bash "$scripts/glue_sweep.sh" \
    "$out/$preset/pretrain/checkpoint_last.pt" "$out/$preset/glue" ${TASKS:-}
  slot_of[$!]=0
  finish
done
for preset in "${trained[@]}"; do
  [ -n "${SQUAD:-}" ] || break
  for version in ${VERSIONS:-1.1 2.0}; do for seed in $seeds; do
    folder=$out/$preset/squad$version/seed$seed
    # shellcheck disable=SC2086  # OPTIONS are words
    limited "$folder/train.log" env SET= bash "$scripts/squad.sh" "$SQUAD" "$data" "$out/$preset/pretrain/checkpoint_last.pt" \
      "$folder" --no-save --squad-version "$version" --seed "$seed" --lr "${rate%% *}" ${OPTIONS:-}
  done; done
done
finish
"$PYTHON" "$scripts/collect.py" "$out" --pretraining --properties --output "$out/report"
[ "$failed" -eq 0 ] || { echo "compare: $failed steps failed, see the logs in $out" >&2; exit 1; }
