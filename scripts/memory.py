"""Prints how many sequences fit on a GPU in masked-LM training with --fp16; counted, no GPU is needed.

python scripts/memory.py --arch tupe_r_large --card 16 32
"""

import argparse

from tupe.memory import step_bytes

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA's context, communication buffers and fragmentation: an allowance, not a measurement


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="tupe_r_large", help="architecture (default: tupe_r_large)")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence (default: 512)")
    parser.add_argument("--card", type=float, nargs="+", default=[16, 32], metavar="GIB", help="sizes of GPUs")
    args = parser.parse_args()
    print("| sequences | activations checkpointed | state | activations | transient | sum, GiB | fits on |")
    print("|---|---|---|---|---|---|---|")
    for again in (False, True):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            try:
                sizes = step_bytes(args.arch, batch, args.length, checkpoint_activations=again)
            except ValueError as error:
                parser.error(str(error))
            parts = [sizes[part] for part in ("state", "activations", "transient")]
            fits = [f"{card:g} GiB" for card in args.card if sum(parts) + RESERVE <= card * GIB]
            cells = [f"{part / GIB:.2f}" for part in (*parts, sum(parts))]
            print(f"| {batch} | {'yes' if again else 'no'} | {' | '.join(cells)} | {', '.join(fits) or 'none'} |")


if __name__ == "__main__":
    main()
