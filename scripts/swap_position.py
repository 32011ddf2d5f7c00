"""Give a trained model another position encoding and keep every other weight.

python scripts/swap_position.py CHECKPOINT --position untied+t5 --output swapped.pt

Continue training it with: bash scripts/continue.sh DATA swapped.pt SAVE_DIR
"""

import argparse

from tupe.checkpoints.files import save_atomically
from tupe.checkpoints.swap import dictionary_of, swap_position
from tupe.safe_load import read_checkpoint
from tupe.schemes import SCHEMES


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--position", required=True, help=f"schemes joined by '+', from: {', '.join(sorted(SCHEMES))}")
    parser.add_argument("--cls", choices=["tied", "untied"], help="default: as in the checkpoint")
    parser.add_argument("--segments", action="store_true", help="add segment embeddings (next-sentence objective)")
    parser.add_argument("--output", required=True, help="checkpoint to write")
    parser.add_argument("--data", help="folder with dict.txt (default: the training data's)")
    parser.add_argument("--seed", type=int, default=1, help="of the new parameters")
    args = parser.parse_args(arguments)
    try:
        state = read_checkpoint(args.checkpoint)
        dictionary = dictionary_of(state, args.data)
        swapped = swap_position(state, dictionary, args.position, args.cls, args.segments, args.seed)
    except ValueError as error:
        parser.error(str(error))
    save_atomically(swapped, args.output)
    old, new = (f"{s['cfg']['model']['position']}, [CLS] {s['cfg']['model']['cls']}" for s in (state, swapped))
    print(f"{args.output}: {old} -> {new}")


if __name__ == "__main__":
    main()
