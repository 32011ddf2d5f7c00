"""Pictures that explain, with made-up numbers: TUPE's idea, and a layer with the places where encodings act."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from .plotting import BLUE, GREY, HEAT, NARROW, RED, SMALL, plt

ARROW = {"arrowstyle": "-|>", "color": "black", "lw": 0.9, "shrinkA": 0, "shrinkB": 0}

# ----------------------------------------------------------------------------------------------------- the idea of TUPE

WORDS = ["[CLS]", "she", "looked", "out", "of", "the", "window"]


def sums() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What BERT and TUPE add up: {what is compared: logits [7 queries, 7 keys]}, from 0 to 1. Those of words are noise,
    or stripes of a word; those of positions alone have a diagonal, which projections of their own make sharp."""
    noise, away = np.random.default_rng(1), np.subtract.outer(range(7), range(7))
    words, across, down, blurred = noise.uniform(size=(4, 7, 7))
    sharp = np.where(away == -1, 1, np.exp(-0.5 * abs(away + 1))) * (0.7 + 0.3 * blurred)
    bert = {
        "word ·\nword": words,
        "word ·\nposition": 0.25 * across + 0.75 * across[:, :1],
        "position ·\nword": 0.25 * down + 0.75 * down[:1],
        "position ·\nposition": 0.5 * blurred + 0.5 * np.exp(-0.4 * abs(away)),
    }
    tupe = {
        "word ·\nword": words,
        "position ·\nposition": sharp,
        "a bias for\nthe distance": np.exp(-0.7 * abs(away - 1)),
    }
    return bert, tupe


def idea() -> Figure:
    """BERT's logits above, TUPE's below: what is added up, and how often each part is computed."""
    size, left, gap, height = 0.9, 0.62, 0.17, 3.75  # inches: of a map, of the words, between maps
    figure = plt.figure(figsize=(NARROW, height))

    def write(x: float, y: float, words: str, **look) -> None:
        figure.text(x / NARROW, y / height, words, va="center", **({"fontsize": SMALL} | look))

    bert, tupe = sums()
    for top, title, maps in (
        (height, "BERT compares sums: (word + position) · (word + position)", bert),
        (height / 2 - 0.05, "TUPE compares words, and apart from them positions", tupe),
    ):
        write(0.1, top - 0.13, title, weight="bold", fontsize=9)
        y = top - 0.62 - size
        for n, (name, matrix) in enumerate(maps.items()):
            x, once = left + n * (size + gap), maps is tupe and n > 0
            axis = figure.add_axes((x / NARROW, y / height, size / NARROW, size / height))
            axis.imshow(matrix, cmap=HEAT, vmin=0, vmax=1)
            axis.set_title(name, fontsize=SMALL, pad=3)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set(color=BLUE if once else RED, linestyle="--" if once else "-", linewidth=1.2)
            if once:  # [CLS] has no place
                axis.add_patch(Rectangle((-0.5, -0.5), 7, 1, facecolor="#dddddd"))
                axis.add_patch(Rectangle((-0.5, -0.5), 1, 7, facecolor="#dddddd"))
            if n:
                write(x - gap / 2, y + size / 2, "+", ha="center", fontsize=9)
            else:
                axis.set_yticks(range(7), WORDS, fontsize=SMALL)
                axis.tick_params(length=0)
        if maps is bert:
            write(left, y - 0.12, "computed in every layer, all by the same W", color=RED)
        else:
            write(left, y - 0.12, "in every layer", color=RED)
            write(left + size + gap, y - 0.12, "once for all layers, positions by a W of their own", color=BLUE)
            grey = "grey: from\nand to [CLS],\ntwo learned\nnumbers\nper head"
            write(x + size + 0.1, y + size / 2, grey, color=GREY)
    return figure


# ----------------------------------------------------------------------------------------------------- a drawn layer


class Hook(NamedTuple):
    name: str  # of the method of `PositionScheme`
    example: str  # a scheme that has it
    does: str
    in_every_layer: bool  # once for all layers otherwise


SIGNS = {"embed": "+", "content": "+", "bias": "+", "gate": "x", "value": "+"}  # at their places
STEPS: list[str | Hook] = [  # from the words to the next layer
    "word vectors",
    Hook("embed", "absolute", "a vector is added to each word's", False),
    "q, k, v of each head",
    Hook("rotate", "rope", "q and k are turned by their place", True),
    "q · k",
    Hook("content", "shaw", "logits of words with positions", True),
    "times the scale",
    Hook("bias", "t5", "logits of positions alone", False),
    Hook("cls_bias", "untied", "other numbers from and to [CLS]", False),
    Hook("reach", "window", "keys too far away are hidden", True),
    "softmax",
    Hook("gate", "urpe", "weights are multiplied", False),
    "weights · v",
    Hook("unrotate", "rope_values", "mixed values are turned back", True),
    Hook("value", "shaw_values", "vectors of offsets are added", True),
    "out, to the next layer",
]


def icon(name: str) -> np.ndarray:
    """What a hook's numbers look like, from 0 to 1: [dimensions, places] of `embed` and `value`, [queries, keys] of the
    others; made up."""
    i, j = np.mgrid[:6, :6]
    if name in ("embed", "value"):
        return 0.5 + 0.5 * np.sin((j + 2 * (name == "value")) * 1.9 / 1.5**i)
    if name == "content":
        return np.random.default_rng(4).uniform(size=(6, 6)) * (0.35 + 0.65 * np.exp(-0.4 * abs(j - i - 1)))
    if name == "cls_bias":
        return np.where(i == 0, 0.45, np.where(j == 0, 0.9, 0.0))
    if name == "reach":
        return (abs(j - i) > 1) * 1.0
    return np.exp(-0.6 * abs(j - i - (name == "bias")))  # bias, gate


def draw_turn(axis: Axes, x: float, y: float, size: float, colour: str, back: bool) -> None:
    """A vector and the same vector turned."""
    first, last = ((x + size * 0.9, y), (x + size * 0.45, y + size * 0.85))[:: -1 if back else 1]
    for tip, alpha in ((first, 0.4), (last, 1.0)):
        axis.annotate("", tip, (x, y), arrowprops={**ARROW, "color": colour, "alpha": alpha, "lw": 1.3})
    bend = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={-0.35 if back else 0.35}", "shrinkA": 3, "shrinkB": 4}
    axis.annotate("", last, first, arrowprops={**ARROW, **bend, "color": colour})


def layer() -> Figure:
    """One attention layer from the top to the bottom, and where each hook of an encoding acts in it."""
    step, centre, left, side = 0.46, 0.98, 2.08, 0.36  # inches: between steps, of the flow, of the hooks, of an icon
    height = step * len(STEPS) + 0.3
    figure = plt.figure(figsize=(NARROW, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    places = {step_: height - 0.25 - step * n for n, step_ in enumerate(STEPS)}
    top, bottom = (places[STEPS[n]] + m * 0.52 * step for n, m in ((2, 1), (-2, -1)))
    frame = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": "#f2f2f2", "edgecolor": "none", "zorder": 0}
    axis.add_patch(FancyBboxPatch((0.1, bottom), 1.76, top - bottom, **frame))
    axis.text(0.18, (top + bottom) / 2, "one layer", rotation=90, va="center", color=GREY)
    for n, (what, y) in enumerate(places.items()):
        if n:
            axis.annotate("", (centre, y + 0.12), (centre, y + step - 0.12), arrowprops=ARROW, zorder=1)
        if isinstance(what, str):
            box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "black", "linewidth": 0.9}
            axis.text(centre, y, what, ha="center", va="center", bbox=box, zorder=3)
            continue
        colour, dash = (RED, "-") if what.in_every_layer else (BLUE, "--")
        circle = {"markersize": 11, "markerfacecolor": "white", "markeredgewidth": 1.6, "zorder": 3}
        axis.plot(centre, y, "o", color=colour, **circle)
        if sign := SIGNS.get(what.name):
            axis.plot(centre, y, sign, color=colour, markersize=6, markeredgewidth=1.4, zorder=4)
        axis.plot([centre + 0.1, left], [y, y], color=colour, linewidth=1, linestyle=dash)
        if what.name in ("rotate", "unrotate"):
            draw_turn(axis, left + 0.06, y - 0.13, 0.3, colour, what.name == "unrotate")
        else:
            shades = LinearSegmentedColormap.from_list("", ["white", colour])
            extent = (left + 0.04, left + 0.04 + side, y - side / 2, y + side / 2)
            axis.imshow(icon(what.name), cmap=shades, vmin=0, vmax=1, extent=extent, interpolation="nearest", zorder=2)
            axis.add_patch(Rectangle((extent[0], extent[2]), side, side, fill=False, edgecolor=colour, zorder=3))
        name = axis.text(left + 0.5, y + 0.09, what.name, color=colour, weight="bold", va="center")
        axis.annotate(f"  {what.example}", (1, 0.5), xycoords=name, va="center", family="monospace")
        axis.text(left + 0.5, y - 0.09, what.does, va="center", fontsize=SMALL)
    for y, colour, dash, words in ((0.32, BLUE, "--", "once, for all layers"), (0.11, RED, "-", "in every layer")):
        axis.plot([left, left + 0.4], [y] * 2, color=colour, linestyle=dash, linewidth=1)
        axis.text(left + 0.5, y, words, color=colour, va="center")
    axis.set(xlim=(0, NARROW), ylim=(0, height), aspect="auto")
    return figure
