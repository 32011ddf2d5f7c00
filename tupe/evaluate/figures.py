"""Figures of what `probes` reads from models, and the command `tupe plot`.

L sequence length, H heads, C model width.
"""

import functools
from collections.abc import Callable

import click
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from ..common import options
from ..common.options import FILE, FOLDER, QuietCommand
from ..common.plotting import HEAT, curves, grid, heat, legend, of_models, save, style
from . import probes
from .loading import labelled, load_model, text_block

# --------------------------------------------------------------------------------------------------------- the figures


def correlations(parts: dict) -> Figure:
    """The four correlations of word and position (and the remainder, if it is there), averaged over heads; one colour
    scale for all, its middle at 0. parts: name -> [H, L, L]. The paper's figure 2."""
    means = {name: part.mean(0).numpy() for name, part in parts.items()}
    limit = max(np.percentile(abs(m), 99) for m in means.values())
    figure, axes = grid(len(means), len(means))
    for axis, (name, matrix) in zip(axes, means.items(), strict=True):
        image = heat(axis, matrix, vmin=-limit, vmax=limit)
        axis.set_title(f"{name}\nsd {matrix.std():.3g}", fontsize=9)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes.tolist(), label="logit", shrink=0.8, extend="both")
    return figure


def positional(logits: torch.Tensor) -> Figure:
    """Positional logits of every head, [H, L, L], without [CLS]; each head labelled by `probes.pattern` and with its
    own colour scale (printed above it). The paper's figure 6."""
    figure, axes = grid(len(logits), min(len(logits), 4))
    for head, (axis, matrix) in enumerate(zip(axes, logits, strict=False)):
        words = matrix[1:, 1:].numpy()
        heat(axis, words, first=1)
        what, low, high = probes.pattern(matrix), words.min(), words.max()
        axis.set_title(f"head {head + 1}: {what}\nlogits {low:.3g} to {high:.3g}", fontsize=9)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure


def losses(lines: dict) -> Figure:
    """Validation losses by updates. lines: label -> (updates, losses)."""
    figure, (axis,) = curves()
    looks = of_models(lines)
    for label, (updates, values) in lines.items():
        axis.plot(updates, values, label=label, **looks[label])
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


def tsne(vectors: np.ndarray, seed: int = 0) -> Figure:
    """Position vectors [L, C] in two dimensions by t-SNE; colour and a few numbers give the position, and a line joins
    neighbours."""
    from sklearn.manifold import TSNE  # slow to import

    perplexity = min(30, (len(vectors) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(vectors)
    figure, axis = plt.subplots(figsize=(4.8, 4), layout="constrained")
    axis.plot(*points.T, color="0.8", linewidth=0.6, zorder=1)
    image = axis.scatter(*points.T, c=np.arange(len(points)), cmap=HEAT, s=14, edgecolors="0.4", linewidths=0.3)
    for position in range(0, len(points), max(len(points) // 16, 1)):
        axis.annotate(str(position), points[position], fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])
    figure.colorbar(image, label="position")
    return figure


def phi(m: np.ndarray, before: np.ndarray, after: np.ndarray) -> Figure:
    """phi(m) = sum cos(omega_i m) of sinusoids whose frequencies are learned."""
    figure, (axis,) = curves()
    for index, (label, values) in enumerate([("before learning", before), ("after learning", after)]):
        axis.plot(m, values, label=label, markevery=8, **style(index))
    axis.set_xlabel("offset m")
    axis.set_ylabel(r"$\phi(m) = \sum_i \cos(\omega_i m)$")
    legend(figure, columns=2)
    return figure


# --------------------------------------------------------------------------------------------------------- the command


@click.group()
def command() -> None:
    """Figures of trained encodings and of losses."""


def drawing(function: Callable) -> click.Command:
    """A command of `tupe plot`, named as its function without "draw_". The function gets the command's options, and
    returns a figure to write to --output and what its title says more: which layer it shows, where that matters."""

    @functools.wraps(function)
    def draw(output, title, **options):
        path = output if output.suffix else output.with_suffix(".png")
        figure, layer = function(**options)
        figure.suptitle(f"{title} ({layer})" if title and layer else title or layer)
        save(figure, path)
        click.echo(path)

    draw = click.option("--title", default="", help="The line above the figure.")(draw)
    draw = click.option(
        "--output", type=FILE, required=True, help="The file to write: .png (the default), .svg or .pdf."
    )(draw)  # fmt: skip
    return command.command(cls=QuietCommand, name=function.__name__.removeprefix("draw_"))(draw)


one_checkpoint = options.checkpoint("The checkpoint of a pre-training.")
several = click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]CHECKPOINT ...")
data = click.option("--data", type=FOLDER, help="The folder of dict.txt (default: that of the training).")
layer = click.option("--layer", type=click.IntRange(1), default=1, show_default=True,
                     help="The layer to draw, of encodings with `:layer`.")  # fmt: skip
length = click.option("--length", type=click.IntRange(3),
                      help="Tokens of a sequence (default: as many as the model takes).")  # fmt: skip


def of_layer(function: Callable) -> click.Command:
    """A `drawing` of one layer of a checkpoint."""
    return drawing(one_checkpoint(data(layer(function))))


@drawing
@one_checkpoint
@data
@length
def draw_correlations(checkpoint, data, length):
    """Word-word, word-position, ... logits of an absolute model's first layer."""
    model, text = load_model(checkpoint, data)
    tokens = text_block(text, length or model.config.max_position_embeddings)
    return correlations(probes.four_correlations(model, tokens)), ""


@of_layer
@length
def draw_positions(checkpoint, data, length, layer):
    """Positional logits of every head (TUPE), each with its pattern."""
    model, _ = load_model(checkpoint, data)
    return positional(probes.positional_logits(model, length, layer - 1)), probes.which_layer(model, layer - 1)


@drawing
@click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]RUN ...")
def draw_loss(sources):
    """Validation loss by updates. RUN: folder of a pre-training."""
    return losses({label: probes.losses_of(path) for label, path in labelled(sources).items()}), ""


@of_layer
def draw_t5(checkpoint, data, layer):
    """T5's bias by offset."""
    model, _ = load_model(checkpoint, data)
    return t5(*probes.t5_bias(model, layer=layer - 1)), probes.which_layer(model, layer - 1, ["t5"])


@drawing
@several
@data
@length
@click.option("--words", type=click.IntRange(1), default=300, show_default=True,
              help="The number of random words; each makes a sequence.")  # fmt: skip
def draw_attention(sources, data, length, words):
    """First-layer attention of models under identical-word probing."""
    models = {label: load_model(path, data) for label, path in labelled(sources).items()}
    matrices = {
        label: probes.identical_word_attention(model, text.symbols, words, length)
        for label, (model, text) in models.items()
    }
    return attention(matrices), ""


@of_layer
def draw_tsne(checkpoint, data, layer):
    """Absolute position vectors in two dimensions."""
    model, _ = load_model(checkpoint, data)
    names = ["untied"] if model.tupe.encoder.positions.embed(1) is None else []
    return tsne(probes.position_vectors(model, layer - 1)), probes.which_layer(model, layer - 1, names)


@of_layer
def draw_phi(checkpoint, data, layer):
    """Sum of cos(omega m), before and after learning the frequencies."""
    model, _ = load_model(checkpoint, data)
    names = ["sinusoidal_learned", "shaw_sinusoidal_learned"]
    return phi(*probes.phi(model, layer=layer - 1)), probes.which_layer(model, layer - 1, names)
