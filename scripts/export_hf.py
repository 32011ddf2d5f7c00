"""Write a checkpoint as a folder for the transformers library; it needs neither fairseq nor this project to load.

python scripts/export_hf.py runs/tupe_r/checkpoint_last.pt OUT --data DATA
python -c "from transformers import AutoModel; AutoModel.from_pretrained('OUT', trust_remote_code=True)"

Back: python scripts/convert_checkpoint.py --from OUT --output DIR
"""

import argparse

from tupe.checkpoints.export import export


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--data", help="folder with dict.txt and sentencepiece.bpe.model (default: the checkpoint's)")
    parser.add_argument("--head", help="classification head to export, if there are several")
    args = parser.parse_args()
    try:
        export(args.checkpoint, args.output, args.data, args.head)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
