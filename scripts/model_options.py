"""Prints the architecture of a checkpoint and, one per line, the fairseq-train options that rebuild its model."""

import argparse
import sys

from tupe.plugin.pretrained import model_options


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    try:
        print("\n".join(model_options(parser.parse_args().checkpoint)))
    except ValueError as error:
        sys.exit(f"model_options.py: {error}")


if __name__ == "__main__":
    main()
