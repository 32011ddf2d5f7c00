"""The table of scripts/quickstart.sh: `python -m lab.quickstart OUTPUT` prints it from the folder of a quickstart. And
the precision that it trains in."""

import json
import math
import time
from pathlib import Path

import click
import numpy as np
import torch

from tupe.checkpoints.trained import read_model
from tupe.common.architectures import with_size
from tupe.common.options import QuietCommand
from tupe.common.tables import TextTable
from tupe.cpu import multiply
from tupe.data.splits import Split, prefixes_of

from .figures import losses_of

MODELS = {"bert_a": "BERT-A", "tupe_r": "TUPE-R"}
MARGIN = 0.3  # bits below the unigram entropy from which on something other than word frequencies was learned
FOOTER = """
Loss and entropy in bits per masked token. Order: per cent of held-out sentences that are likelier than the same with
two adjacent words swapped (50 is chance). One run each, tiny, on three million words: it shows which of the two finds
positions earlier here, and says nothing of models that are trained to the end. The experiment: docs/protocol.md."""


def bf16_speed() -> float:
    """How many times as fast as in float32 this machine's CPU multiplies in bfloat16: about 2 by AMD's AVX-512 BF16,
    more by AMX, 0.5 by Intel's AVX-512 BF16, and far less where it is emulated. Takes a hundredth of a second, or,
    emulated, a few tenths."""
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(4):
        for dtype in seconds:
            x = torch.ones(512, 512, dtype=dtype)
            start = time.perf_counter()
            multiply(x, x)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def unigram_entropy(data: str | Path) -> float:
    """Bits per token of the training text's unigram distribution: the loss of a model that knows only frequencies.

    data: folders of pre-training data, with dict.txt and the split `train`. Raises ValueError if that is not there.
    """
    counts = np.zeros(0)
    for prefix in prefixes_of(data, "train"):
        tokens = Split(prefix).tokens
        for start in range(0, len(tokens), 2**20):  # the text may be larger than memory
            found = np.bincount(tokens[start : start + 2**20], minlength=len(counts))
            counts = found + np.pad(counts, (0, len(found) - len(counts)))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


@click.command(cls=QuietCommand)
@click.argument("output", type=click.Path(path_type=Path))
def table(output):
    """Print the quickstart's table; fails if a model learned no more than frequencies."""
    rows, failed = [], []
    entropy = unigram_entropy(output / "data")
    orders = json.loads((output / "order" / "order.json").read_text(encoding="utf-8"))
    for arch, name in MODELS.items():
        run = output / "models" / "presets" / with_size(arch, "tiny") / arch
        updates, losses = losses_of(run)
        last = run / "checkpoint_last.pt"
        weights = read_model(last if last.exists() else run, mmap=True).weights
        parameters = sum(value.numel() for value in weights.values() if value.is_floating_point())
        cells = [f"{name} tiny", f"{updates[-1]:,}", f"{parameters / 1e6:.2f} M"]
        rows.append([*cells, f"{losses[-1]:.2f}", f"{entropy:.2f}", f"{100 * orders[arch]['order']['accuracy']:.1f}"])
        if losses[-1] > entropy - MARGIN:
            failed.append(f"{name}: validation loss {losses[-1]:.2f} is not {MARGIN} below the entropy {entropy:.2f}")
    header = ["model", "updates", "parameters", "validation loss", "unigram entropy", "order"]
    click.echo(TextTable.plain(header, rows).markdown() + FOOTER)
    if failed:
        raise ValueError("; ".join(["nothing was learned beyond word frequencies", *failed]))


if __name__ == "__main__":
    table(prog_name="quickstart")
