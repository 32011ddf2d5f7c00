"""Inference on texts of real lengths: our encoder beside the common alternatives of the same size, all with random
weights. All take turns on the same batches.

B batch, L length of its longest text.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from torch import Tensor

from tupe.common import options
from tupe.common.options import Command, ListOf
from tupe.data.examples import Examples, collate
from tupe.data.glue import glue_name
from tupe.data.splits import read_symbols
from tupe.run.record import command_line

from .contenders import CONTENDERS, OURS, PAD, Setting, build
from .instrument import Step, compared, comparison, timed, write
from .machine import autocast, environment

LONGEST = 512
COLUMNS = {"padding": "{padding:.0%}", "texts/s": "{texts_per_s:.1f}", "tokens/s": "{tokens_per_s:.0f}"}


class Batch(NamedTuple):
    tokens: Tensor  # [B, L], PAD at the end of shorter texts
    real: Tensor  # [B, L]
    count: int  # of real tokens


def texts(data: Path, task: str) -> Examples:
    """The development set of a task, of at most `LONGEST` tokens each, special ones included. data: folder that
    `tupe prepare glue` wrote.

    Raises ValueError for an unknown task or one that was not prepared.
    """
    name = glue_name(task, data)
    if not (data / name / "input0" / "valid.idx").exists():
        raise ValueError(f"{data} holds no {name}; `tupe prepare glue` writes it")
    return Examples(data / name, "valid", LONGEST)


def batches(texts: Examples, size: int, count: int, device: str, seed: int = 1) -> list[Batch]:
    """So many batches of random texts."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        drawn = [texts[1, int(index)] for index in rng.integers(len(texts), size=size)]
        tokens = collate(drawn)["input_ids"].to(device)
        real = tokens.ne(PAD)
        found.append(Batch(tokens, real, int(real.sum())))
    return found


def classifier(name: str, setting: Setting) -> Callable[[Batch], Tensor]:
    """A contender as the function of a batch to its logits [B, 2]."""
    model = build(name, setting, classes=2).eval()
    if name in OURS:
        return lambda batch: model(batch.tokens, classification_head_name="head", num_tokens=batch.count)[0]
    if name == "fairseq":
        return lambda batch: model(batch.tokens, classification_head_name="head")[0]
    return lambda batch: model(batch.tokens, attention_mask=batch.real.long()).logits


def step(logits: Callable[[Batch], Tensor], drawn: list[Batch], precision: str, device: str) -> Step:
    """Every turn has a batch."""

    def forward(batch: Batch) -> None:
        with torch.inference_mode(), autocast(device, precision):
            logits(batch)

    return lambda turn: timed(device, lambda: forward(drawn[turn]))(turn)


def quantities(row: dict, counted: list[Batch]) -> dict:
    """What follows from a contender's times for these batches."""
    texts, tokens = sum(len(batch.tokens) for batch in counted), sum(batch.count for batch in counted)
    seconds, entries = sum(map(sum, row["steps"])), sum(batch.tokens.numel() for batch in counted)
    return {"padding": 1 - tokens / entries, "texts_per_s": texts / seconds, "tokens_per_s": tokens / seconds}


@click.command(cls=Command)
@options.data("The folder that `tupe prepare glue` wrote.")
@click.option("--tasks", type=ListOf(str), default="CoLA,MRPC", show_default=True, metavar="NAME,...",
              help="Tasks whose texts are taken.")  # fmt: skip
@click.option("--models", type=ListOf(CONTENDERS), default="tupe_r,export,hf,hf-eager,modernbert", show_default=True,
              help=f"Models of {', '.join(CONTENDERS)}.")  # fmt: skip
@options.size()
@click.option("--batch", type=ListOf(click.IntRange(1)), default="1,32", show_default=True, metavar="B,...",
              help="Texts of a batch.")  # fmt: skip
@comparison
def command(data, tasks, models, size, batch, precision, device, turns, output):
    """Compare forward passes over texts of real lengths: our encoder, our export for the transformers library, Hugging
    Face's BERT and ModernBERT. Nothing else should run on the machine.
    """
    of_task = {task: texts(data, task) for task in tasks}
    setting = Setting(size, length=LONGEST, vocab=len(read_symbols(data)), device=device)
    functions = {name: classifier(name, setting) for name in models}
    about, rows = {"command": command_line(), **environment()}, []
    for task, number, kind in itertools.product(tasks, batch, precision):
        drawn = batches(of_task[task], number, turns + 1, device)  # and one of the warm-up
        steps = {name: step(function, drawn, kind, device) for name, function in functions.items()}
        about_these = {"setting": f"{size}, {task}, batch {number}, {kind}"}
        rows += [{**row, **quantities(row, drawn[1:])} for row in compared(steps, turns, about_these)]
        page = write(output, about, rows, COLUMNS)
    click.echo(page)
