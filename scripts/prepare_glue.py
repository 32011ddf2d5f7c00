"""Turn the official GLUE files into fairseq data that shares the vocabulary of pre-training.

python scripts/prepare_glue.py --glue GLUE_FOLDER --data PRETRAINING_DATA --output glue-bin [--tasks CoLA RTE]
"""

import argparse
import os

from tupe.plugin.glue import TASKS, prepare


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue", required=True, help="folder with the official files, one folder per task")
    parser.add_argument("--data", required=True, help="folder that prepare_corpus.py wrote: dictionary and pieces")
    parser.add_argument("--output", required=True, help="folder to write, one folder per task")
    parser.add_argument("--tasks", nargs="+", default=[], help=f"default: all that are there of {', '.join(TASKS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that encode text")
    parser.add_argument("--overwrite", action="store_true", help="replace tasks that were prepared before")
    args = parser.parse_args()
    try:
        for task, manifest in prepare(args.glue, args.data, args.output, args.tasks, args.workers, args.overwrite):
            for split, facts in manifest["splits"].items():
                dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in facts["dropped"].items())
                unknown = facts["unknown"] / facts["tokens"]
                print(
                    f"{task} {split}: {facts['rows']} rows, {facts['tokens']} tokens, {unknown:.2%} unknown, "
                    f"longest {facts['longest']}" + (f"; {dropped}" if dropped else ""),
                    flush=True,
                )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
