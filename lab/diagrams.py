"""The two pictures that explain: the logits of BERT beside those of TUPE, and where each kind of encoding acts. And the
one of long inputs, from its numbers.

python -m lab diagrams
"""

import json
from pathlib import Path

import click
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tupe.common import options, plotting
from tupe.evaluation import extrapolate
from tupe.positions import SCHEMES, overrides

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = DOCS / "figures"
TOKENS = ["[CLS]", "she", "looked", "out", "of", "the", "window"]
HOOKS = {  # hook: where it acts, from the input of a layer to its output
    "embed": "the input\nbefore layer 1",
    "rotate": "queries and keys\nturned",
    "content": "logits,\nwith the words",
    "bias": "logits, one map\nfor all layers",
    "reach": "which keys\nare seen",
    "gate": "weights\nmultiplied",
    "value": "values\nadded to",
}


def maps() -> dict[str, np.ndarray]:
    """Made-up logits [L, L] of each kind of term: words depend on both words, positions on where they stand."""
    rng, length = np.random.default_rng(5), len(TOKENS)
    offset = np.arange(length) - np.arange(length)[:, None]
    words = rng.normal(size=(length, 4)) @ rng.normal(size=(4, length)) / 2.5
    mixed = np.outer(rng.normal(size=length), np.linspace(-1, 1, length))
    apart = np.exp(-((offset - 1.0) ** 2) / 2) * 2 - 0.5 + 0.15 * rng.normal(size=(length, length))
    bias = np.where(offset == 1, 1.5, -0.25 * np.abs(offset))
    apart[0], apart[1:, 0] = np.nan, np.nan  # [CLS] has no position
    bias[0], bias[1:, 0] = np.nan, np.nan
    positions = words.T[::-1]
    return {"words": words, "word, position": mixed, "position, word": mixed.T, "positions": positions, "apart": apart,
            "bias": bias}  # fmt: skip


def idea() -> Figure:
    """BERT: four terms, of the sum of word and position, in every layer. TUPE: positions once, for all layers."""
    terms = maps()
    bert = {"words": "word . word", "word, position": "word . position", "position, word": "position . word",
            "positions": "position . position"}  # fmt: skip
    tupe = {"words": "word . word", "apart": "position . position", "bias": "b (distance)"}
    figure = plt.figure(figsize=(9.6, 2.3), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[4, 3.2])
    for part, title, panels, note in (
        (left, "BERT adds: (word + position) . (word + position)", bert, "all four in every layer, by the same W"),
        (right, "TUPE keeps apart", tupe, "words in every layer; positions and TUPE-R's b once, for all layers"),
    ):
        part.suptitle(title, fontweight="bold", fontsize=10)
        for number, (axis, name) in enumerate(zip(part.subplots(1, len(panels)), panels, strict=True)):
            draw(axis, terms[name], panels[name], TOKENS if number == 0 else None)
            if number:
                axis.text(-0.08, 0.5, "+", transform=axis.transAxes, ha="center", va="center", fontsize=12)
        part.supxlabel(note, fontsize=8.5)
    return figure


def draw(axis: Axes, logits: np.ndarray, label: str, tokens: list[str] | None) -> None:
    """A map of logits; hatched: learned constants from and to [CLS]."""
    axis.set_facecolor("0.85")
    plotting.heat(axis, logits, vmin=-2, vmax=2)
    axis.set_title(label, fontsize=8)
    axis.set_xticks([])
    axis.set_yticks(range(len(TOKENS)) if tokens else [], tokens or [], fontsize=7)
    if np.isnan(logits[0, 0]):
        axis.text(3, 0, "from [CLS]: one number", ha="center", va="center", fontsize=5.5)
        axis.text(0, 3.5, "to [CLS]: another", ha="center", va="center", fontsize=5.5, rotation=90)


def hooks() -> Figure:
    """The hooks of `PositionScheme` in the order in which a layer meets them, and the schemes that use each."""
    users = {hook: [name for name, scheme in SCHEMES.items() if overrides(scheme, hook)] for hook in HOOKS}
    lines = max(map(len, users.values()))
    figure, axis = plt.subplots(figsize=(9.6, 1.1 + 0.165 * lines), layout="constrained")
    axis.set(xlim=(0, len(HOOKS)), ylim=(-lines, 6))
    axis.axis("off")
    for number, (hook, where) in enumerate(HOOKS.items()):
        x, colour = number + 0.5, plotting.COLOURS[1 + number % 7]
        frame = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour, "linewidth": 1.5}
        axis.text(x, 4.5, where, ha="center", va="center", fontsize=8, bbox=frame)
        axis.text(x, 1, f"{hook}()", ha="center", fontsize=9, family="monospace", color=colour, fontweight="bold")
        axis.text(x, 0.4, "\n".join(users[hook]), ha="center", va="top", fontsize=7.5, linespacing=1.3)
        if number:
            arrow = {"arrowstyle": "->", "color": "0.4"}
            axis.annotate("", (number + 0.07, 4.5), (number - 0.07, 4.5), arrowprops=arrow)
    return figure


def long_inputs() -> Figure:
    """The twelve models of docs/long-inputs.md, as `tupe extrapolate` draws them."""
    models = json.loads((DOCS / "extrapolation.json").read_text(encoding="utf-8"))["models"]
    return extrapolate.draw({label: [extrapolate.Loss(**loss) for loss in losses] for label, losses in models.items()})


@click.command("diagrams", cls=options.QuietCommand)
def command():
    """Draw docs/figures/idea.png, docs/figures/hooks.png and docs/extrapolation.png."""
    for figure in (idea, hooks):
        plotting.save(figure(), FIGURES / f"{figure.__name__}.png")
    plotting.save(long_inputs(), DOCS / "extrapolation.png")
