"""Prints how many sequences fit on a GPU in masked-LM training with --fp16; counted, no GPU is needed.

python scripts/memory.py --arch tupe_r_large --card 16 32
python scripts/memory.py --check --arch bert_a_small --length 256      the count beside real steps on this CPU
"""

import argparse

import torch

from tupe.bench.memory import measured_bytes, step_bytes

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA's context, communication buffers and fragmentation: an allowance, not a measurement


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="tupe_r_large", help="architecture (default: tupe_r_large)")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence (default: 512)")
    parser.add_argument("--card", type=float, nargs="+", default=[16, 32], metavar="GIB", help="sizes of GPUs")
    parser.add_argument("--check", action="store_true", help="compare with what this CPU's allocator hands out")
    args = parser.parse_args()
    try:
        check(args.arch, args.length) if args.check else fits(args.arch, args.length, args.card)
    except ValueError as error:
        parser.error(str(error))


def fits(arch, length, cards):
    print("| sequences | activations checkpointed | state | activations | transient | sum, GiB | fits on |")
    print("|---|---|---|---|---|---|---|")
    for again in (False, True):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            sizes = step_bytes(arch, batch, length, checkpoint_activations=again)
            parts = [sizes[part] for part in ("state", "activations", "transient")]
            fitting = [f"{card:g} GiB" for card in cards if sum(parts) + RESERVE <= card * GIB]
            cells = [f"{part / GIB:.2f}" for part in (*parts, sum(parts))]
            print(f"| {batch} | {'yes' if again else 'no'} | {' | '.join(cells)} | {', '.join(fitting) or 'none'} |")


def check(arch, length):
    """Single precision without dropout, beside weights and gradients; MiB."""
    print(
        "| sequences | update_freq | activations checkpointed | kept: counted | measured | peak: counted | measured |"
    )
    print("|---|---|---|---|---|---|---|")
    for again in (False, True):
        options = {"dropout": 0.0, "attention_dropout": 0.0, "checkpoint_activations": again}
        for batch, update_freq in ((2, 1), (8, 1), (2, 4)):
            sizes = step_bytes(arch, batch, length, dtype=torch.float32, **options)
            counted = sizes["activations"], sizes["activations"] + sizes["transient"]
            measured = measured_bytes(arch, batch, length, update_freq=update_freq, **options)
            pairs = zip(counted, (measured["activations"], measured["peak"]), strict=True)
            cells = [f"{size / 2**20:.1f}" for pair in pairs for size in pair]
            print(f"| {batch} | {update_freq} | {'yes' if again else 'no'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
