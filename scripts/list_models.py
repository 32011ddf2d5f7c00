"""Prints every architecture with its parameters, and what its position encoding adds: python scripts/list_models.py
[--size mini]

The counts are of the whole model with LM head, for a vocabulary of 32,768 types; position parameters are itemised
below the table.
"""

import argparse

import torch

from tupe.architectures import ARCHITECTURES, SIZES, with_size
from tupe.encoder import Encoder, LMHead

VOCAB, PAD, MAX_POSITIONS = 32768, 1, 512


def count(module):
    return sum(p.numel() for p in module.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="base")
    size = parser.parse_args().size
    layers, width, heads, ffn = SIZES[size]
    items = {}
    print("| architecture | position | [CLS] | parameters | of these, position |\n|---|---|---|---:|---:|")
    for arch, (position, cls) in ARCHITECTURES.items():
        with torch.device("meta"):  # shapes only
            encoder = Encoder(
                VOCAB, PAD, layers=layers, width=width, ffn=ffn, heads=heads, max_positions=MAX_POSITIONS,
                position=position, cls=cls,
            )  # fmt: skip
            total = count(encoder) + count(LMHead(width, VOCAB))
        items[with_size(arch, size)] = {name: tuple(p.shape) for name, p in encoder.positions.named_parameters()}
        print(f"| `{with_size(arch, size)}` | {position} | {cls} | {total:,} | {count(encoder.positions):,} |")
    for arch, shapes in items.items():
        print(f"\n{arch}:")
        for name, shape in shapes.items():
            print(f"  {name:24} {' x '.join(map(str, shape)):>12} = {torch.Size(shape).numel():,}")


if __name__ == "__main__":
    main()
