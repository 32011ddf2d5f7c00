"""Fine-tune a checkpoint on GLUE tasks with every learning rate and seed; called by glue_sweep.sh. Can be killed and
started again: what is done stays done."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import tupe.plugin  # noqa: E402, F401  (registers the architectures)
from tupe.experiments.runner import slots  # noqa: E402
from tupe.experiments.sweep import LEARNING_RATES, SEEDS, Sweep, end_cleanly_on_sigterm  # noqa: E402


def main():
    logging.basicConfig(level="WARNING", force=True)
    end_cleanly_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("tasks", nargs="*", help="default: all that were prepared")
    parser.add_argument("--data", required=True, help="folder that prepare_glue.py wrote")
    parser.add_argument("--lrs", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, help="processes at a time (default: one per GPU; one on a CPU)")
    parser.add_argument("--keep-best", action="store_true", help="keep the best checkpoint of each task")
    parser.add_argument("--retry-failed", action="store_true", help="run failed jobs again")
    parser.add_argument("--options", default="", help="more fairseq-train options for every job, as one string")
    args = parser.parse_args()
    tasks = args.tasks or sorted(path.parent.name for path in Path(args.data).glob("*/manifest.json"))
    try:
        sweep = Sweep(
            args.checkpoint, args.data, args.output, tasks, args.lrs, args.seeds, args.options.split(), args.keep_best
        )
        states = sweep.run(slots(args.jobs), args.retry_failed, say=lambda line: print(line, flush=True))
    except ValueError as error:
        parser.error(str(error))
    failed = [str(job) for job, state in states.items() if state != "done"]
    if failed:
        sys.exit(f"sweep: {len(failed)} jobs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
