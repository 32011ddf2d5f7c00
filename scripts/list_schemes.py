"""Prints a Markdown table of all position schemes: name, paper, formula, hooks, and parameters at BERT-Base size.

The table in docs/schemes.md is this command's output.
"""

import argparse

from tupe.positions import Dims, PositionScheme, overrides
from tupe.schemes import SCHEMES

HOOKS = [name for name, value in vars(PositionScheme).items() if callable(value) and not name.startswith("_")]
BASE = Dims(max_positions=512, width=768, heads=12, layers=12, head_dim=64, value_dim=64)


def row(name):
    scheme = SCHEMES[name]
    hooks = ", ".join(hook for hook in HOOKS if overrides(scheme, hook)) or "none"
    parameters = sum(p.numel() for p in scheme(BASE).parameters())
    formula = scheme.formula.replace("|", "\\|")
    return f"| `{name}` | {scheme.paper} | `{formula}` | {hooks} | {parameters:,} |"


def main(arguments=None):
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print("| name | paper | formula | hooks | parameters (base, 512 positions) |")
    print("|---|---|---|---|--:|")
    for name in SCHEMES:
        print(row(name))


if __name__ == "__main__":
    main()
