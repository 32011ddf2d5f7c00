"""What the heads of trained models look at, as pictures and numbers: `python -m lab gallery`.

L sequence length ([CLS] included), H heads.
"""

import csv
import io
import re
from typing import NamedTuple

import click
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from tupe.attention import Recorder
from tupe.common import options
from tupe.evaluate.loading import HeldOut, models
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.run.folder import write_atomically

from .cls import blocks_of_length
from .plotting import NARROW, heat, plt, save

WEIGHTS = LogNorm(0.003, 0.6)  # the colours of weights, the same for all models
COLUMNS = ("model", "layer", "head", "previous", "next", "itself", "near", "cls", "entropy", "lowest",
           "highest")  # fmt: skip


class Head(NamedTuple):
    layer: int  # counted from 1, as `head`
    head: int
    weights: np.ndarray  # [L, L], mean over sequences
    entropy: float  # bits, mean over queries; of words alone, as all shares below
    logits: np.ndarray | None  # [L, L], those of positions alone

    def share(self, low: int, high: int) -> float:
        """The share of the weights that words give to words at offsets (key - query) from `low` to `high`: a mean over
        the words that have all of these."""
        length = len(self.weights)
        queries = range(max(1, 1 - low), length - max(0, high))
        return float(np.mean([self.weights[i, i + low : i + high + 1].sum() for i in queries]))

    def row(self, model: str) -> dict:
        """Its line of heads.csv."""
        near = self.share(-3, -1) + self.share(1, 3)
        shares = {"previous": self.share(-1, -1), "next": self.share(1, 1), "itself": self.share(0, 0), "near": near,
                  "cls": float(self.weights[1:, 0].mean())}  # fmt: skip
        shown = {name: f"{value:.4f}" for name, value in shares.items()}
        row = {"model": model, "layer": self.layer, "head": self.head, **shown, "entropy": f"{self.entropy:.2f}"}
        if self.logits is not None:
            row |= {name: f"{value:.1f}" for name, value in zip(COLUMNS[-2:], extremes(self.logits), strict=True)}
        return row


def extremes(logits: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest of logits [L, L] between words."""
    words = logits[1:, 1:]
    return words.min() + 0.0, words.max() + 0.0  # + 0.0: no minus before a zero


@torch.no_grad()
def heads_of(model: TupeForMaskedLM, text: HeldOut, sequences: int, batch: int = 16) -> list[Head]:
    """Every head of a model, over sequences of held-out text, as long as the model takes, without a hidden token."""
    tokens = blocks_of_length(text, model.config.max_position_embeddings, sequences)
    totals = entropies = 0
    for part in tokens.split(batch):
        recorder = Recorder(model.tupe.encoder.normaliser)
        model.tupe.encoder(part, backend=recorder)
        weights = torch.stack(recorder.weights_of_layers).double()  # [N, B, H, L, L]
        totals = totals + weights.sum(1)
        entropies = entropies - torch.xlogy(weights, weights).sum(-1)[..., 1:].mean(-1).sum(1) / np.log(2)
    return [
        Head(layer + 1, head + 1, (totals[layer, head] / len(tokens)).numpy(),
             float(entropies[layer, head] / len(tokens)), None if bias is None else bias[head].float().numpy())
        for layer, bias in enumerate(recorder.biases)
        for head in range(totals.size(1))
    ]  # fmt: skip


def position_logits(heads: list[Head]) -> dict[str, np.ndarray]:
    """{title: logits [L, L]} of positions alone: of the first layer's heads if all layers share them."""
    having = [one for one in heads if one.logits is not None]
    first = {one.head: one.logits for one in having if one.layer == 1}
    if all(np.array_equal(one.logits, first[one.head]) for one in having):
        return {f"all layers, head {head}": logits for head, logits in first.items()}
    return {f"layer {one.layer}, head {one.head}": one.logits for one in having}


def words_of(head: Head) -> str:
    """The shares of at least 10 %, the larger first."""
    row = head.row("")
    shares = {"[CLS]" if name == "cls" else name: float(row[name]) for name in ("previous", "next", "itself", "cls")}
    large = sorted((share for share in shares.items() if share[1] >= 0.1), key=lambda share: -share[1])
    return "\n".join(f"{100 * share:.0f} % {name}" for name, share in large[:2]) or "spread"


def portrait(heads: list[Head], tokens: int, columns: int = 4) -> Figure:
    """Mean weights of every head over the first tokens; below, where there are any, the logits of positions alone, each
    with the colours of its own range over words."""
    logits, size, gap = position_logits(heads), 1.08, 0.085  # inches: of a map, between maps
    rows = [-(-len(maps) // columns) for maps in (heads, logits)]
    height = 1.7 * sum(rows) + 0.55
    figure = plt.figure(figsize=(NARROW, height))
    box = size / NARROW, size / height
    lefts = [(gap + column * (size + gap)) / NARROW for column in range(columns)]
    lows = [1 - (0.24 + size + 1.7 * row) / height for row in range(sum(rows))]
    axes = np.array([[figure.add_axes((x, y, *box), visible=False) for x in lefts] for y in lows])
    for axis, one in zip(axes.flat, heads, strict=False):
        title = f"layer {one.layer}, head {one.head}"
        image = draw(axis, one.weights[:tokens, :tokens], title, words_of(one), norm=WEIGHTS)
    for axis, (title, matrix) in zip(axes[rows[0] :].flat, logits.items(), strict=False):
        low, high = extremes(matrix)
        draw(axis, matrix[:tokens, :tokens], title, f"logits\n{low:.1f} to {high:.1f}", vmin=low, vmax=high)
    place = figure.add_axes((0.06, 0.4 / height, 0.88, 0.1 / height))
    bar = figure.colorbar(image, place, orientation="horizontal", extend="both")
    bar.set_ticks([0.003, 0.01, 0.03, 0.1, 0.3], labels=["0.3 %", "1 %", "3 %", "10 %", "30 %"], fontsize=8.5)
    bar.minorticks_off()
    bar.set_label("mean weight of a key (across) for a query (down)", fontsize=8.5)
    return figure


def draw(axis: Axes, matrix: np.ndarray, title: str, below: str, **colours) -> AxesImage:
    axis.set_visible(True)
    image = heat(axis, matrix, **colours)
    axis.set_title(title, fontsize=8.5)
    axis.set_xlabel(below, fontsize=8.5)
    axis.set(xticks=[], yticks=[])
    return image


@click.command("gallery", cls=options.QuietCommand)
@models
@click.option("--sequences", type=click.IntRange(1), default=256, show_default=True,
              help="Held-out sequences to average over.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True, help="The first tokens are drawn.")
@click.option("--output", type=options.FOLDER, required=True,
              help="The folder of LABEL.png for each model, and of heads.csv.")  # fmt: skip
def command(models, sequences, tokens, output):
    """Draw what the heads of models look at, and write how much of it goes where.

    A label is the name of a picture: python -m lab gallery rope=runs/rope t5=runs/t5 --output gallery
    """
    rows = []
    for label, model, text in models:
        if not re.fullmatch(r"[\w.+-]+", label):
            raise ValueError(f"{label!r:.80} cannot name a picture; give NAME=CHECKPOINT, such as rope={label:.80}")
        heads = heads_of(model, text, sequences)
        rows += [one.row(label) for one in heads]
        save(portrait(heads, tokens), output / f"{label}.png")
        click.echo(output / f"{label}.png")
    content = io.StringIO()
    writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(output / "heads.csv", content.getvalue())
