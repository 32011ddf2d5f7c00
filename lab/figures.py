"""Figures of a trained encoding and of losses: `python -m lab plot`.

L sequence length ([CLS] and [SEP] included), H heads.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from matplotlib.figure import Figure

from tupe.common import options
from tupe.common.options import FILE, QuietCommand
from tupe.evaluate.loading import labelled, load_model
from tupe.run import record

from .plotting import curves, grid, heat, legend, save, style

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from tupe.modeling_tupe import TupeForMaskedLM


@torch.no_grad()
def positional_logits(model: "TupeForMaskedLM", length: int | None = None, layer: int = 0) -> torch.Tensor:
    """[H, L, L] content-free logits that a model with `untied` or another bias adds. length: default the longest.
    ValueError if there are none, or no such layer or length."""
    positions, longest = model.tupe.encoder.positions, model.config.max_position_embeddings
    if not 0 <= layer < len(model.tupe.encoder.layers):
        raise ValueError(f"unknown layer {layer + 1}; valid, counted from 1: 1 to {len(model.tupe.encoder.layers)}")
    if length is not None and length > longest:
        raise ValueError(f"a length of {length}; valid: at most {longest}, the model's longest")
    bias, _ = positions.terms(length or longest)[layer]
    if bias is None:
        raise ValueError(f"position {positions.name!r} has no content-free logits")
    return bias


def positional(logits: torch.Tensor) -> Figure:
    """Positional logits of every head, [H, L, L], without [CLS]; each head with its own colour scale (printed above
    it). The paper's figure 6."""
    figure, axes = grid(len(logits))
    for head, (axis, matrix) in enumerate(zip(axes, logits, strict=False)):
        words = matrix[1:, 1:].numpy()
        heat(axis, words, first=1)
        axis.set_title(f"head {head + 1}\nlogits {words.min():.3g} to {words.max() + 0.0:.3g}", fontsize=9)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure


def losses_of(folder: str | Path) -> tuple:
    """(updates, validation losses in bits per masked token), two lists, of the folder of a pre-training. Raises
    ValueError if there are none, also of a fine-tuning."""
    run = record.read(folder)
    is_pretraining = run is not None and not run.metrics
    entries = run.of_first_split() if is_pretraining else []
    if not entries:
        raise ValueError(f"{folder} has no validation losses; valid: the folder of a pre-training")
    return [entry["num_updates"] for entry in entries], [entry["loss"] for entry in entries]


def losses(lines: dict) -> Figure:
    """Validation losses by updates. lines: label -> (updates, losses)."""
    figure, axis = curves()
    for index, (label, (updates, values)) in enumerate(lines.items()):
        axis.plot(updates, values, label=label, **style(index))
    axis.set_xlabel("updates")
    axis.set_ylabel("validation loss\n(bits per masked token; ELECTRA: nats)")
    legend(figure)
    return figure


def write(figure: Figure, output: Path) -> None:
    path = output if output.suffix else output.with_suffix(".png")
    save(figure, path)
    click.echo(path)


output = click.option("--output", type=FILE, required=True, help="The file to write: .png (the default), .svg or .pdf.")


@click.command(cls=QuietCommand)
@options.checkpoint("The checkpoint of a pre-training.")
@options.data("The folder of dict.txt (default: that of the training).", required=False)
@click.option("--layer", type=click.IntRange(1), default=1, show_default=True,
              help="The layer to draw, of encodings with `:layer`.")  # fmt: skip
@click.option("--length", type=click.IntRange(3),
              help="Tokens of a sequence (default: as many as the model takes).")  # fmt: skip
@output
def draw_positions(checkpoint, data, layer, length, output):
    """Positional logits of every head (TUPE)."""
    model, _ = load_model(checkpoint, data)
    write(positional(positional_logits(model, length, layer - 1)), output)


@click.command(cls=QuietCommand)
@click.argument("sources", nargs=-1, required=True, metavar="[LABEL=]RUN ...")
@output
def draw_loss(sources, output):
    """Validation loss by updates. RUN: folder of a pre-training."""
    write(losses({label: losses_of(path) for label, path in labelled(sources).items()}), output)
