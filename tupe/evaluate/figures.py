"""Figures of what `probes` reads from models, and the command `tupe plot`.

L sequence length, H heads.
"""

import functools
from collections.abc import Callable

import click
import numpy as np
import torch
from matplotlib.figure import Figure

from ..common import options
from ..common.options import FILE, QuietCommand
from ..common.plotting import curves, grid, heat, legend, save, style
from . import probes
from .loading import labelled, load_model, models

# --------------------------------------------------------------------------------------------------------- the figures


def positional(logits: torch.Tensor) -> Figure:
    """Positional logits of every head, [H, L, L], without [CLS]; each head with its own colour scale (printed above
    it). The paper's figure 6."""
    figure, axes = grid(len(logits), min(len(logits), 4))
    for head, (axis, matrix) in enumerate(zip(axes, logits, strict=False)):
        words = matrix[1:, 1:].numpy()
        heat(axis, words, first=1)
        axis.set_title(f"head {head + 1}\nlogits {words.min():.3g} to {words.max():.3g}", fontsize=9)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure


def losses(lines: dict) -> Figure:
    """Validation losses by updates. lines: label -> (updates, losses)."""
    figure, (axis,) = curves()
    for index, (label, (updates, values)) in enumerate(lines.items()):
        axis.plot(updates, values, label=label, **style(index))
    axis.set_xlabel("updates")
    axis.set_ylabel("validation loss\n(bits per masked token; ELECTRA: nats)")
    legend(figure)
    return figure


def t5(offsets: np.ndarray, bias: np.ndarray) -> Figure:
    """T5's bias by offset, one line per head, a marker where a bucket begins. bias: [H, offsets]. Offsets are spaced as
    T5's buckets are: evenly up to 8, then logarithmically."""
    figure, (axis,) = curves(width=6)
    begins = np.flatnonzero(np.r_[True, (bias[:, 1:] != bias[:, :-1]).any(0)]).tolist()
    for head, values in enumerate(bias):
        axis.plot(offsets, values, label=f"head {head + 1}", markevery=begins, **style(head))
    axis.set_xscale("symlog", base=2, linthresh=8, linscale=2.5)
    ticks = [tick for tick in (0, 4, 8, 16, 32, 64, 128) if tick <= offsets[-1]]
    axis.set_xticks([-tick for tick in ticks[:0:-1]] + ticks)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel("offset (key - query)")
    axis.set_ylabel("logit")
    legend(figure, columns=min(len(bias), 6))
    return figure


def attention(matrices: dict) -> Figure:
    """Attention under identical-word probing, one panel per encoding: label -> A [L, L]. [CLS] and [SEP] are left out;
    the scale of each panel ends at its 99th percentile."""
    figure, axes = grid(len(matrices), min(len(matrices), 3), size=2.3, beside=0.8)
    for axis, (label, matrix) in zip(axes, matrices.items(), strict=False):
        words = matrix[1:-1, 1:-1]
        image = heat(axis, words, first=1, vmin=np.percentile(words, 1), vmax=np.percentile(words, 99))
        axis.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axis, fraction=0.046, extend="both").ax.tick_params(labelsize=7)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure


# --------------------------------------------------------------------------------------------------------- the command


@click.group()
def command() -> None:
    """Figures of trained encodings and of losses."""


def drawing(function: Callable) -> click.Command:
    """A command of `tupe plot`, named as its function without "draw_". The function gets the command's options, and
    returns a figure to write to --output."""

    @click.option("--output", type=FILE, required=True, help="The file to write: .png (the default), .svg or .pdf.")
    @click.option("--title", default="", help="The line above the figure.")
    @functools.wraps(function)
    def draw(output, title, **options):
        path = output if output.suffix else output.with_suffix(".png")
        figure = function(**options)
        figure.suptitle(title)
        save(figure, path)
        click.echo(path)

    return command.command(cls=QuietCommand, name=function.__name__.removeprefix("draw_"))(draw)


one_checkpoint = options.checkpoint("The checkpoint of a pre-training.")
data = options.data("The folder of dict.txt (default: that of the training).", required=False)
layer = click.option("--layer", type=click.IntRange(1), default=1, show_default=True,
                     help="The layer to draw, of encodings with `:layer`.")  # fmt: skip
length = click.option("--length", type=click.IntRange(3),
                      help="Tokens of a sequence (default: as many as the model takes).")  # fmt: skip


@drawing
@one_checkpoint
@data
@layer
@length
def draw_positions(checkpoint, data, length, layer):
    """Positional logits of every head (TUPE)."""
    model, _ = load_model(checkpoint, data)
    return positional(probes.positional_logits(model, length, layer - 1))


@drawing
@one_checkpoint
@data
@layer
def draw_t5(checkpoint, data, layer):
    """T5's bias by offset."""
    model, _ = load_model(checkpoint, data)
    return t5(*probes.t5_bias(model, layer - 1))


@drawing
@click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]RUN ...")
def draw_loss(sources):
    """Validation loss by updates. RUN: folder of a pre-training."""
    return losses({label: probes.losses_of(path) for label, path in labelled(sources).items()})


@drawing
@models
@length
@click.option("--words", type=click.IntRange(1), default=300, show_default=True,
              help="The number of random words; each makes a sequence.")  # fmt: skip
def draw_attention(models, length, words):
    """First-layer attention of models under identical-word probing."""
    return attention({
        label: probes.identical_word_attention(model, text.symbols, words, length) for label, model, text in models
    })  # fmt: skip
