"""Masked-LM loss on sequences longer than those of the training, the same tokens scored at every length.

One draw of masks on a long window of running text serves all lengths: the scored tokens are the masked ones of its
middle, and a shorter length cuts context, with its masks, from both ends. So the lengths differ only in context.

A model that was trained with random positions is scored with random ones, as its authors do (Ruoss et al., 2023), and
beside that with 0, 1, 2, ..., of which its training hardly had any.

L sequence length, M the longest L, n the length of the training, W number of windows.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from ..common.options import Command, ListOf, output, seed
from ..common.plotting import curves, legend, save, style
from ..common.tables import TextTable
from ..data.blocks import BOS, EOS
from ..encoder import Encoder
from ..positions import bounded_schemes
from .loading import losses_at, models, text_block, write_results

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

MASKED = 0.15  # share of tokens, all replaced by <mask>


@dataclass
class Windows:
    """Running text with masks."""

    words: np.ndarray  # [W, M - 2] ids, without <s> and </s>
    masked: np.ndarray  # [W, M - 2] bool
    scored: np.ndarray  # [W, M - 2] bool: masked, and among the n - 2 in the middle; as many in every window


@dataclass
class Loss:
    """The loss at one length, in bits per scored token; errors are standard errors over windows."""

    length: int
    mean: float
    error: float
    difference: float  # from the shortest length, window by window
    difference_error: float


def draw_windows(stream: np.ndarray, trained: int, longest: int, count: int, seed: int = 1) -> Windows:
    """Evenly spaced windows of a stream of ids, whose middles do not overlap. trained, longest: n and M. Raises
    ValueError for a stream that has fewer than `count`."""
    middle, size = trained - 2, longest - 2
    available = (len(stream) - size) // middle + 1 if len(stream) >= size else 0
    if available < count:
        what = f"{len(stream)} tokens of text hold {available} windows of {longest} tokens, fewer than {count}"
        fewer = f"--windows {available} or fewer, or " if available > 1 else ""
        raise ValueError(f"{what}; valid here: {fewer}smaller --multiples of the training length, {trained}")
    starts = np.linspace(0, available - 1, count).astype(int) * middle
    words = np.stack([stream[start : start + size] for start in starts])
    rng, begin = np.random.default_rng(seed), (size - middle) // 2
    masked = rng.random(words.shape) < MASKED
    scored = np.zeros_like(masked)
    for row in range(count):  # exactly so many in each
        chosen = begin + rng.choice(middle, max(1, round(MASKED * middle)), replace=False)
        scored[row, chosen] = True
    masked[:, begin : begin + middle] = scored[:, begin : begin + middle]
    return Windows(words, masked, scored)


def window_losses(model: "TupeForMaskedLM", windows: Windows, length: int, batch_tokens: int = 8192) -> np.ndarray:
    """[W], the mean loss in bits of each window's scored tokens, in sequences of `length` around its middle."""
    size = length - 2
    begin = (windows.words.shape[1] - size) // 2
    words, masked, scored = (
        torch.from_numpy(array[:, begin : begin + size]) for array in (windows.words, windows.masked, windows.scored)
    )
    tokens = F.pad(words.masked_fill(masked, model.config.mask_token_id), (1, 0), value=BOS)
    tokens = F.pad(tokens, (0, 1), value=EOS)
    losses = []
    for rows in torch.arange(len(tokens)).split(max(1, batch_tokens // length)):
        where = F.pad(scored[rows], (1, 1)).nonzero(as_tuple=True)
        loss = losses_at(model, tokens[rows], where, words[rows][scored[rows]], tokens[rows].numel())
        losses.append(loss.view(len(rows), -1).double().mean(1) / math.log(2))
    return torch.cat(losses).numpy()


@contextmanager
def drawn_positions(encoder: Encoder, seed: int) -> Iterator[None]:
    """Inside, the encoder draws positions for each batch, as in its training, from this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder.draws_in_evaluation = True
        try:
            yield
        finally:
            encoder.draws_in_evaluation = False


def extrapolation(
    model: "TupeForMaskedLM", stream: np.ndarray, trained: int, multiples: list[int], windows: int, seed: int = 1,
    draws: int = 0,
) -> list[Loss]:  # fmt: skip
    """The loss at each multiple of the training length that the model can compute, the shortest first; with positions
    0, 1, 2, ..., or the mean over so many draws of positions. Raises ValueError for too little text, or no length that
    can be computed."""
    lengths = [multiple * trained for multiple in sorted(multiples)]
    encoder, longest = model.tupe.encoder, model.config.max_position_embeddings
    limited = bounded_schemes(encoder.positions.name)
    possible = [length for length in lengths if not (limited or draws) or length <= longest]
    if not possible:
        what = f"{' and '.join(limited)} has vectors for" if limited else "positions are drawn from"
        raise ValueError(f"{what} {longest} positions, fewer than {lengths[0]}")
    drawn = draw_windows(stream, trained, lengths[-1], windows, seed)  # for all models alike
    by_length, shortest = [], None
    for length in possible:
        if draws:
            with drawn_positions(encoder, seed):
                losses = np.mean([window_losses(model, drawn, length) for _ in range(draws)], axis=0)
        else:
            losses = window_losses(model, drawn, length)
        shortest = losses if shortest is None else shortest
        change = losses - shortest
        error, change_error = (x.std(ddof=1) / math.sqrt(len(x)) for x in (losses, change))
        by_length.append(Loss(length, losses.mean().item(), error.item(), change.mean().item(), change_error.item()))
    return by_length


def draw(results: dict[str, list[Loss]]) -> Figure:
    """Loss by length with 95 % intervals over windows."""
    figure, (axis,) = curves()
    for index, (label, losses) in enumerate(results.items()):
        lengths, means = [loss.length for loss in losses], [loss.mean for loss in losses]
        axis.errorbar(lengths, means, [1.96 * loss.error for loss in losses], label=label, capsize=2, **style(index))
    every = sorted({loss.length for losses in results.values() for loss in losses})
    axis.set_xscale("log", base=2)
    axis.set_xticks(every, [f"{length:,}" for length in every])
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.set_ylabel("masked-LM loss (bits per token)")
    legend(figure)
    return figure


def tabulate(results: dict[str, list[Loss]], lengths: list[int]) -> str:
    """Markdown: the loss at the shortest length, then the change, with 95 % intervals; nothing where the model has no
    positions."""
    rows = []
    for label, losses in results.items():
        at = {loss.length: loss for loss in losses}
        first = f"{losses[0].mean:.3f} ± {1.96 * losses[0].error:.3f}" if lengths[0] in at else ""
        change = [
            f"{at[length].difference:+.3f} ± {1.96 * at[length].difference_error:.3f}" if length in at else ""
            for length in lengths[1:]
        ]
        rows.append([label, first, *change])
    header = ["model", f"bits at {lengths[0]} tokens", *(f"change at {length}" for length in lengths[1:])]
    return TextTable.plain(header, rows).markdown()


@click.command(cls=Command)
@models
@click.option("--multiples", type=ListOf(int), default="1,2,4,8,16", show_default=True,
              help="Lengths to score, as multiples of the training length; smaller ones need less data.")  # fmt: skip
@click.option("--length", type=click.IntRange(4), help="The training length (default: that of the first model).")
@click.option("--windows", type=click.IntRange(2), default=200, show_default=True,
              help="Stretches of text to score; lower it for small data.")  # fmt: skip
@click.option("--draws", type=click.IntRange(1), default=8, show_default=True,
              help="Draws of positions, for models trained with random or shifted ones.")  # fmt: skip
@output("The folder of the results: extrapolation.json, .md and .png.")
@seed(help="The seed of the masks.")
def command(models, multiples, length, windows, draws, output, seed):
    """Masked-LM loss on longer sequences than in training, the same tokens scored at every length.

    A model trained with random or shifted positions is scored as it was trained, over several draws of them, and has a
    second row with positions 0, 1, 2, ...

    For small data: --windows 20 --multiples 1,2,4, or what the error says.

    \b
    tupe extrapolate T5=runs/t5/checkpoint_last.pt ALiBi=runs/alibi/checkpoint_last.pt --output extrapolation
    """
    if min(multiples) < 1 or len(set(multiples)) < len(multiples):
        raise ValueError(f"--multiples {multiples}: valid are different whole numbers from 1 on")
    results, notes = {}, {}
    for label, model, text in models:
        # Random positions are drawn from more than a block has, and tables can be longer than it.
        length, most = length or text.masking["tokens_per_sample"], model.config.max_position_embeddings
        stream = text_block(text, sys.maxsize).numpy()[1:]  # all of the split, over which windows are spread
        row, places = label, model.tupe.encoder.config.places
        if places != "consecutive":
            results[label] = extrapolation(model, stream, length, multiples, windows, seed, draws)
            notes[label] = f"scored with {places} positions of {most}, as trained: {draws} draws"
            row = f"{label}, positions 0, 1, 2, ..."
        results[row] = extrapolation(model, stream, length, multiples, windows, seed)
    content = {"windows": windows, "masked": MASKED, "seed": seed, "positions": notes}
    content["models"] = {label: [asdict(loss) for loss in losses] for label, losses in results.items()}
    table = tabulate(results, [multiple * length for multiple in sorted(multiples)])
    table += "".join(f"\n- {label}: {note}\n" for label, note in notes.items())
    write_results(output, "extrapolation", content, table)
    save(draw(results), output / "extrapolation.png")
