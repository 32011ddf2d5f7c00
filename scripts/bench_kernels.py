#!/usr/bin/env python
"""Milliseconds of the parts of a step, in turns: products and dropout against PyTorch's, a layer and what happens once
per step in float32 and bf16, attention by every path.

python scripts/bench_kernels.py                # the tables of docs/performance.md
python scripts/bench_kernels.py --device cuda  # sdpa against the concatenation of TUPE-A's queries and keys
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tupe.attention import PATHS
from tupe.bench import kernels as bench_kernels
from tupe.bench import step as bench


def main():
    names = [*PATHS, "concatenated"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", choices=names, help="default: all that the device has")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 128], metavar="L")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch; B = tokens / L")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"], choices=["float32", "bf16"])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.0], help="of the attention weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    paths = args.paths or [name for name in names if args.device == "cpu" or name != "blocked"]
    print(", ".join(f"{key} {value}" for key, value in bench.environment().items() if value is not None) + "\n")
    bench_kernels.parts_table(args.tokens, 768, 3072, args.device, args.turns)
    precisions = {name: {"float32": torch.float32, "bf16": torch.bfloat16}[name] for name in args.precision}
    shapes = [(max(1, args.tokens // length), length) for length in args.lengths]
    print()
    bench_kernels.step_table(*shapes[0], 768, 3072, args.vocab, precisions, args.device, args.turns)
    for dropout in args.dropout:
        print()
        bench_kernels.attention_table(paths, shapes, precisions.values(), args.device, args.turns, dropout)


if __name__ == "__main__":
    main()
