"""Prints, one per line, the arguments with which fairseq-train follows a recipe of configs/; called by launch.sh."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from hydra.errors import HydraException  # noqa: E402

import tupe.plugin  # noqa: E402, F401  (registers the architectures)
from tupe.plugin.launch import fairseq_arguments  # noqa: E402

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main():
    logging.basicConfig(format="%(levelname)s: %(message)s", level="WARNING", stream=sys.stderr, force=True)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, usage="recipe.py RECIPE [options] -- DATA [fairseq-train options]"
    )
    parser.add_argument("recipe", choices=sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="changes of the recipe (Hydra)")
    parser.add_argument("--processes", type=int, default=1, help="number of GPUs in all (default: 1)")
    parser.add_argument("--cpu", action="store_true", help="there is no GPU")
    parser.add_argument("--dry-run", action="store_true", help="replace no damaged checkpoint")
    args = parser.parse_args(sys.argv[1:split])
    try:
        words = fairseq_arguments(
            CONFIGS, args.recipe, args.set, sys.argv[split + 1 :], args.processes, not args.cpu, args.dry_run
        )
    except (ValueError, HydraException) as error:
        sys.exit(f"{args.recipe}: {error}")
    print("\n".join(words))


if __name__ == "__main__":
    main()
