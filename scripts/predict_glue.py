"""Write the files that the GLUE server takes: one per test set, with the official names and labels, zipped together.

    python scripts/predict_glue.py --data glue-bin --output submission CoLA=runs/cola/checkpoint_best.pt MNLI=...

MNLI gives MNLI-m.tsv, MNLI-mm.tsv and, if it was prepared, AX.tsv. Tasks without a checkpoint are left out.
"""

import argparse
import logging
import warnings

warnings.simplefilter("ignore")

import tupe.plugin  # noqa: E402, F401  (registers the architectures)
from tupe.evaluation.predict import predict_glue, zip_submission  # noqa: E402


def main():
    logging.basicConfig(level="WARNING", force=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="TASK=CHECKPOINT", help="fine-tuned checkpoint of each task")
    parser.add_argument("--data", required=True, help="folder that prepare_glue.py wrote, with the test sets")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    written = {}
    try:
        for given in args.checkpoints:
            task, equals, checkpoint = given.partition("=")
            if not equals:
                raise ValueError(f"{given!r} is not of the form TASK=CHECKPOINT")
            for path, count in predict_glue(task, checkpoint, args.data, args.output, args.batch_size):
                written[path] = count
                print(f"{path}: {count} predictions", flush=True)
        print(zip_submission(args.output, written))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
