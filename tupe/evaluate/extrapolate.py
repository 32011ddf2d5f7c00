"""Masked-LM loss on sequences longer than those of the training, the same tokens scored at every length.

One draw of masks on a long window of running text serves all lengths: the scored tokens are the masked ones of its
middle, and a shorter length cuts context, with its masks, from both ends. So the lengths differ only in context.

L sequence length, n and M the shortest and the longest L, W number of windows.
"""

import math
from dataclasses import asdict, dataclass

import click
import numpy as np
import torch
import torch.nn.functional as F

from ..common.options import Command, ListOf, output, seed
from ..common.tables import TextTable
from ..positions import bounded_schemes
from .loading import Model, framed, losses_at, models, warn_if_unlike, write_results

MASKED = 0.15  # share of tokens, all replaced by <mask>


@dataclass
class Loss:
    """The loss at one length, in bits per scored token; errors are standard errors over windows."""

    length: int
    mean: float
    error: float
    difference: float  # from the shortest length, window by window
    difference_error: float


def draw_windows(
    stream: np.ndarray, shortest: int, longest: int, count: int, seed: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, masks), [W, M - 2] each, without <s> and </s>: evenly spaced windows of a stream of ids, whose middles do
    not overlap, and have the same number of masks in every window. shortest, longest: n and M. Raises ValueError for a
    stream that has fewer than `count`."""
    middle, size = shortest - 2, longest - 2
    available = (len(stream) - size) // middle + 1 if len(stream) >= size else 0
    if available < count:
        what = f"{len(stream)} tokens of text hold {available} windows of {longest} tokens, fewer than {count}"
        fewer = f"--windows {available} or fewer, or " if available > 1 else ""
        raise ValueError(f"{what}; valid here: {fewer}smaller --lengths")
    starts = np.linspace(0, available - 1, count).astype(int) * middle
    words = np.stack([stream[start : start + size] for start in starts]).astype(np.int64)
    rng, begin = np.random.default_rng(seed), (size - middle) // 2
    masked = rng.random(words.shape) < MASKED
    masked[:, begin : begin + middle] = False
    for row in masked:
        row[begin + rng.choice(middle, max(1, round(MASKED * middle)), replace=False)] = True
    return words, masked


def window_losses(model: Model, windows: tuple, shortest: int, length: int, batch_tokens: int = 8192) -> np.ndarray:
    """[W], the mean loss in bits of each window's masked tokens in its middle of n tokens, in sequences of `length`
    around it. windows, shortest: see `draw_windows`."""
    begin, middle = ((windows[0].shape[1] - size + 2) // 2 for size in (length, shortest))
    words, masked = (torch.from_numpy(array[:, begin : begin + length - 2]) for array in windows)
    scored = masked.clone()
    scored[:, : middle - begin] = scored[:, middle - begin + shortest - 2 :] = False
    tokens = framed(model, words, masked)
    losses = []
    for rows in torch.arange(len(tokens)).split(max(1, batch_tokens // length)):
        where = F.pad(scored[rows], (1, 1)).nonzero(as_tuple=True)
        loss = losses_at(model, tokens[rows], where, words[rows][scored[rows]], tokens[rows].numel())
        losses.append(loss.view(len(rows), -1).double().mean(1) / math.log(2))
    return torch.cat(losses).numpy()


def extrapolation(model: Model, stream: np.ndarray, lengths: list[int], windows: int, seed: int = 1) -> list[Loss]:
    """The loss at each of these lengths that the model can compute, the shortest first. Raises ValueError for too
    little text, or no length that can be computed."""
    lengths, longest = sorted(lengths), model.config.max_position_embeddings
    limited = bounded_schemes(model.tupe.encoder.positions.name)
    possible = [length for length in lengths if not limited or length <= longest]
    if not possible:
        raise ValueError(f"{' and '.join(limited)} has vectors for {longest} positions, fewer than {lengths[0]}")
    drawn = draw_windows(stream, lengths[0], lengths[-1], windows, seed)  # for all models alike
    by_length, shortest = [], None
    for length in possible:
        losses = window_losses(model, drawn, lengths[0], length)
        shortest = losses if shortest is None else shortest
        change = losses - shortest
        error, change_error = (x.std(ddof=1) / math.sqrt(len(x)) for x in (losses, change))
        by_length.append(Loss(length, losses.mean().item(), error.item(), change.mean().item(), change_error.item()))
    return by_length


def tabulate(results: dict[str, list[Loss]], lengths: list[int], windows: int) -> str:
    """Markdown: the loss at the shortest length, then the change, with 95 % t-intervals over windows; nothing
    where the model has no positions."""
    from scipy import stats  # takes a second

    rows, t = [], stats.t.ppf(0.975, windows - 1)
    for label, losses in results.items():
        at = {loss.length: loss for loss in losses}
        first = f"{losses[0].mean:.3f} ± {t * losses[0].error:.3f}" if lengths[0] in at else ""
        change = [
            f"{at[length].difference:+.3f} ± {t * at[length].difference_error:.3f}" if length in at else ""
            for length in lengths[1:]
        ]
        rows.append([label, first, *change])
    header = ["model", f"bits at {lengths[0]} tokens", *(f"change at {length}" for length in lengths[1:])]
    return TextTable.plain(header, rows).markdown()


@click.command(cls=Command)
@models
@click.option("--lengths", type=ListOf(int), help="Tokens of a sequence; shorter ones need less data (default: the "
              "training length of the first model, 2 and 4 times that).")  # fmt: skip
@click.option("--windows", type=click.IntRange(2), default=200, show_default=True,
              help="Stretches of text to score; lower it for small data.")  # fmt: skip
@output("The folder of the results: extrapolation.json and .md.")
@seed(help="The seed of the masks.")
def command(models, lengths, windows, output, seed):
    """Masked-LM loss on longer sequences than in training, the same tokens scored at every length.

    For small data: --windows 20, or what the error says.

    \b
    tupe extrapolate T5=runs/t5/checkpoint_last.pt ALiBi=runs/alibi/checkpoint_last.pt --output extrapolation
    """
    if lengths and (min(lengths) < 4 or len(set(lengths)) < len(lengths)):
        raise ValueError(f"--lengths {lengths}: valid are different whole numbers from 4 on")
    results, first = {}, None
    for label, model, text in models:
        first = first or text
        warn_if_unlike(label, text, first, ())
        lengths = sorted(lengths or [multiple * text.masking["tokens_per_sample"] for multiple in (1, 2, 4)])
        results[label] = extrapolation(model, text.split().tokens, lengths, windows, seed)
    content = {"windows": windows, "masked": MASKED, "seed": seed}
    content["models"] = {label: [asdict(loss) for loss in losses] for label, losses in results.items()}
    write_results(output, "extrapolation", content, tabulate(results, lengths, windows))
