"""Convert checkpoints of other code to this project's, and back. What --from is, is found out from its contents.

python scripts/convert_checkpoint.py --from released.pt --dict dict.txt --output DIR     the released TUPE code
python scripts/convert_checkpoint.py --from checkpoint_best.pt --to released --dict DATA/dict.txt --output DIR
python scripts/convert_checkpoint.py --from BERT_FOLDER --output DIR                     a Hugging Face BERT
python scripts/convert_checkpoint.py --from EXPORT_FOLDER --output DIR                   what export_hf.py wrote

DIR gets checkpoint.pt and dict.txt; with --codes it also serves prepare_glue.py as --data. Use the checkpoint with
TupeModel.from_pretrained(DIR, "checkpoint.pt"), --finetune-from-model or --restore-file. No code from the input is run.
"""

import argparse

from tupe.checkpoints import convert


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="source", required=True, help="checkpoint file, or folder of a Hugging Face model"
    )
    parser.add_argument("--to", choices=["tupe", "released"], default="tupe", help="what to write (default: tupe)")
    parser.add_argument("--dict", help="dict.txt of the model (default: beside the checkpoint, or in the export)")
    parser.add_argument(
        "--codes", help="the released model's BPE codes (fastBPE or subword-nmt), copied to DIR/bpe.codes"
    )
    parser.add_argument("--heads", type=int, help="attention heads, where a checkpoint does not say")
    parser.add_argument("--output", required=True, help="folder to write")
    args = parser.parse_args()
    try:
        path = convert.convert(args.source, args.to, args.dict, args.output, args.heads, args.codes)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
