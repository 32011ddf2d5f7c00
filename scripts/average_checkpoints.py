"""Average, strip or merge checkpoints; the result has no optimizer state.

python scripts/average_checkpoints.py --last 5 RUN_FOLDER --output averaged.pt     mean of the last 5 of a run
python scripts/average_checkpoints.py A.pt B.pt C.pt --output averaged.pt          mean of these
python scripts/average_checkpoints.py --strip CHECKPOINT --output small.pt         weights and configuration only
python scripts/average_checkpoints.py --merge LAST-shard*.pt --output merged.pt    shards of --use-sharded-state
"""

import argparse
import re
from pathlib import Path

from tupe.checkpoints import files as checkpoints
from tupe.safe_load import read_checkpoint


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="checkpoints, or with --last the folder of a run")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--last", type=int, metavar="K", help="average the K checkpoints after the most updates")
    how.add_argument("--strip", action="store_true", help="drop the optimizer state of one checkpoint")
    how.add_argument("--merge", action="store_true", help="put the shards of one checkpoint together")
    parser.add_argument("--output", required=True, help="file to write")
    args = parser.parse_args()
    if (args.last or args.strip) and len(args.inputs) != 1:
        parser.error("--last takes one folder, --strip one checkpoint")
    try:
        paths = checkpoints.newest(args.inputs[0], args.last) if args.last else [Path(path) for path in args.inputs]
        if args.strip:
            state = checkpoints.strip(read_checkpoint(paths[0]))
        elif args.merge:
            paths.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])  # 2 before 10
            state = checkpoints.merge_shards(paths)
        else:
            state = checkpoints.average(paths)
    except ValueError as error:
        parser.error(str(error))
    for path in paths:
        print(f"read  {path}: {path.stat().st_size:,} bytes")
    checkpoints.save_atomically(state, args.output)
    print(f"wrote {args.output}: {Path(args.output).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
