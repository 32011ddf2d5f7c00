"""Properties of a checkpoint's position encoding under identical-word probing (Wang et al.), as a Markdown table.

python scripts/probe.py CHECKPOINT [LABEL=CHECKPOINT ...] [--data FOLDER] [--save FILE.npz]
"""

import argparse

import numpy as np

from tupe.evaluation.probes import identical_word_attention, labelled, load_model, measures


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="[LABEL=]CHECKPOINT")
    parser.add_argument("--data", help="folder with dict.txt (default: the training data's)")
    parser.add_argument("--words", type=int, default=300, help="random words, one sequence each")
    parser.add_argument("--length", type=int, help="sequence length (default: the model's longest)")
    parser.add_argument("--layer", type=int, default=1, help="layer, counted from 1")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of words")
    parser.add_argument("--save", help="write the averaged attention matrices there (.npz)")
    args = parser.parse_args(arguments)
    matrices = {}
    try:
        for label, path in labelled(args.checkpoints).items():
            model, _ = load_model(path, args.data)
            matrices[label] = identical_word_attention(model, args.words, args.length, args.layer - 1, args.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    found = {label: measures(matrix) for label, matrix in matrices.items()}
    print("| | " + " | ".join(found) + " |")
    print("|---|" + "--:|" * len(found))
    for measure in next(iter(found.values())):
        print(f"| {measure} | " + " | ".join(f"{values[measure]:.4g}" for values in found.values()) + " |")
    if args.save:
        np.savez(args.save, **matrices)


if __name__ == "__main__":
    main()
