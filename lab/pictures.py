"""The pictures of the pages that need no trained model: a drawn layer, and what committed tables hold.

python -m lab pictures    draw all of them into docs/figures
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from tupe.common import options

from .estimates import mean_interval
from .known import FIRST, Runs
from .plan import Trial
from .plotting import DASHES, INKS, MARKERS, NARROW, name_lines, plt, save
from .recompute import BESIDE, CHANGES, CONTRASTS, verdicts_of_c, verdicts_of_d, verdicts_of_main

FOLDER = FIRST.parent / "figures"
BLUE, RED, GREY = INKS[1], INKS[2], "#555555"
SMALL = 8.5  # points, the smallest letters
ARROW = {"arrowstyle": "-|>", "color": "black", "lw": 0.9, "shrinkA": 0, "shrinkB": 0}

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


# ------------------------------------------------------------------------------------------------------- the results


class Line(NamedTuple):
    """A mean with its interval, and the words at both ends of its row."""

    of: str
    mean: float
    interval: tuple[float, float]
    values: list[float]  # by seed
    verdict: str


def claims(runs: Runs) -> dict[str, list[Line]]:
    """What each change gains, in bits: the claims, and below the parts of the bundle, as docs/results.md has them."""
    found = defaultdict(list)
    stages = {"mini": ("decide", "bundle"), "tiny": ("tiny_decide", "tiny_bundle")}
    decisions = {"mini, first": verdicts_of_main(runs)}
    decisions |= {size: verdicts_of_d(runs, d) | verdicts_of_c(runs, c, d) for size, (d, c) in stages.items()}
    for pair, change in {**CONTRASTS, **CHANGES, BESIDE: "no terms of words with positions"}.items():
        change = change.partition(" (")[0]
        for of, decided in decisions.items():
            if pair in decided:
                one, verdict = decided[pair]
                low, high = sorted(-bound for bound in one.interval)
                values = [-value for value in one.differences.values()]
                found[change].append(Line(of, -one.mean, (low, high), values, verdict))
    return found


NOTE = """by how much the loss is lower, bits per masked token
filled: resolved. hollow: not resolved. strokes: seeds"""
LEFT = -0.38  # where the rows of a forest begin
LOOKS = {"mini": (BLUE, "o"), "tiny": (RED, "s"), "mini, first": (GREY, "^")}  # of the means


def forest(groups: dict[str, list[Line]]) -> Figure:
    """A row for each mean and interval, around a line of 0; hollow: not resolved."""
    rows = sum(1.25 + len(lines) for lines in groups.values())
    row, above, below = 0.165, 0.25, 0.68  # inches
    height = row * rows + above + below
    figure = plt.figure(figsize=(NARROW, height))
    axis = figure.add_axes((0.19, below / height, 0.49, row * rows / height))
    y = 0.0
    for title, lines in groups.items():
        y -= 1.0
        write(axis, LEFT, y, title, weight="bold")
        for line in lines:
            y -= 1.0
            colour, marker = LOOKS[line.of]
            draw_line(axis, line, y, colour, marker, line.verdict != "not resolved")
            words = f"{line.of} ({len(line.values)})"
            write(axis, LEFT, y, words, fontsize=SMALL, color=colour)
            write(axis, 1.02, y, line.verdict, fontsize=SMALL)
        y -= 0.25
    axis.set(ylim=(y, 0), yticks=[], xlabel=NOTE)
    around_zero(axis)
    write(axis, LEFT, 0.3, "size (seeds)", fontsize=SMALL, color=GREY)
    write(axis, 1.02, 0.3, "verdict", fontsize=SMALL, color=GREY)
    return figure


def draw_line(axis: Axes, line: Line, y: float, colour: str, marker: str, filled: bool) -> None:
    axis.plot(line.interval, [y, y], color=colour, linewidth=1.4, solid_capstyle="butt")
    axis.plot(line.values, [y] * len(line.values), "|", color=colour, markersize=5, markeredgewidth=0.8)
    axis.plot(line.mean, y, marker, color=colour, markersize=5, markerfacecolor=colour if filled else "white", zorder=3)


def write(axis: Axes, x: float, y: float, words: str, **look) -> None:
    """Words in a row; x in widths of the axes, which may lie behind them."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.text(x, y, words, transform=axis.get_yaxis_transform(), va="center", bbox=box, zorder=2, **look)


def around_zero(axis: Axes) -> None:
    axis.axvline(0, color="black", linewidth=0.9, zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(labelsize=SMALL)


# -------------------------------------------------------------------------------------------------- delay and offset

EXPERIMENTS = {  # title, which begins with the size: (stages, whether the rate is constant)
    "mini, rate decays": (("decide", "bundle"), False),
    "tiny, rate decays": (("tiny_decide", "tiny_bundle"), False),
    "mini, constant rate": (("lasting",), True),
    "tiny, constant rate, all at 0.002": (("tiny_same_rate",), True),
    "tiny, constant rate, TUPE at twice BERT-A's rate": (("tiny_lasting",), True),
}
PLAIN = {
    "absolute_halved": "BERT-A, logits / sqrt(2D)", "untied_raw": "TUPE-A, no norm",
    "absolute_0.06": "BERT-A, larger vectors", "bert_r": "BERT-R", "both": "BERT-A, position logits",
    "bert_a_d": "BERT-A^d", "tupe_a_tie_cls": "TUPE-A, [CLS] tied", "tupe_a": "TUPE-A", "tupe_r": "TUPE-R",
}  # fmt: skip


def leads_in(path: Path = FIRST / "delay.csv") -> dict[str, dict[str, tuple[Line, Line | None]]]:
    """{experiment: {model: (delay, offset)}} of delay.csv. Where the rate decays: the updates between the exits, and
    the gap 2,000 updates after them; at a constant rate: both as fitted. No offset: a training ends before that."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    found = defaultdict(dict)
    for title, (stages, constant) in EXPERIMENTS.items():
        columns = ("fit_delay", "fit_offset") if constant else ("delay", "gap_2000")
        by_model = defaultdict(list)
        for one in rows:
            trial = Trial.parse(one["run"])
            if trial.stage in stages and trial.model in PLAIN:
                by_model[trial.model].append(one)
        for model in (model for model in PLAIN if model in by_model):
            lines = []
            for column in columns:
                values = [float(one[column]) for one in by_model[model] if one[column]]
                whole = len(values) == len(by_model[model])
                lines.append(Line(PLAIN[model], *mean_interval(values), values, "") if whole else None)
            found[title][model] = tuple(lines)
    return found


def delays(found: dict[str, dict[str, tuple[Line, Line | None]]]) -> Figure:
    """A row for each model of each experiment: its delay on the left, its offset on the right."""
    row, above, below = 0.165, 0.05, 0.85  # inches
    rows = sum(1.25 + len(models) for models in found.values())
    height = row * rows + above + below
    figure = plt.figure(figsize=(NARROW, height))
    left, right = (
        figure.add_axes((x, below / height, width, row * rows / height)) for x, width in ((0.335, 0.36), (0.725, 0.265))
    )
    y = 0.0
    for title, models in found.items():
        y -= 1.0
        colour, marker = LOOKS[title[:4]]
        write(left, -0.93, y, title, weight="bold")
        for lines in models.values():
            y -= 1.0
            write(left, -0.93, y, lines[0].of, fontsize=SMALL)
            for axis, line in zip((left, right), lines, strict=True):
                if line:
                    draw_line(axis, line, y, colour, marker, not line.interval[0] <= 0 <= line.interval[1])
                else:
                    write(axis, 0.42, y, "left too late", fontsize=SMALL, color=GREY)
        y -= 0.25
    words = "delay: by how many updates\nBERT-A leaves later", "offset: bits ahead\nafter both left"
    for axis, label in zip((left, right), words, strict=True):
        axis.set(ylim=(y, 0), yticks=[], xlabel=label)
        around_zero(axis)
    left.text(-0.93, -0.8 / row / rows, "filled: the interval excludes 0. strokes: seeds", transform=left.transAxes,
              fontsize=SMALL, color=GREY)  # fmt: skip
    left.set_xticks([-1500, 0, 1500, 3000], ["-1,500", "0", "1,500", "3,000"])
    return figure


# ---------------------------------------------------------------------------------------------------- longer inputs

AS_TRAINED = ["DeBERTa v2", "FIRE", "RoPE", "T5", "KERPLE", "sinusoidal", "ALiBi"]  # can read more
ALTERED = ["untied, stretched", "TUPE-R, stretched", "absolute, stretched", "RoPE, positions / 16", "RoPE, YaRN 16",
           "T5, random", "absolute, random"]  # fmt: skip


def lengths(models: dict[str, list[dict]]) -> Figure:
    """Loss against length: models as they were trained, and below altered copies and random positions."""
    figure, axes = plt.subplots(2, 1, figsize=(NARROW, 7.4), layout="constrained")
    titles = "trained on 128 tokens, and left as they are", "altered copies, and two trained on random positions"
    for axis, names, title in zip(axes, (AS_TRAINED, ALTERED), titles, strict=True):
        ends = []
        for index, name in enumerate(names):
            xs = [math.log2(one["length"]) for one in models[name]]
            ys, errors = ([one[key] for one in models[name]] for key in ("mean", "error"))
            axis.errorbar(
                xs, ys, [1.96 * error for error in errors], color=INKS[index], linestyle=DASHES[index % 4],
                marker=MARKERS[index % len(MARKERS)], markersize=3.5, linewidth=1.5, elinewidth=0.8,
            )  # fmt: skip
            ends.append((ys[-1], name, INKS[index]))
        low, high = axis.get_ylim()
        name_lines(axis, ends, xs[-1], beside=0.15, apart=0.065 * (high - low))
        axis.set_title(title, fontsize=9, loc="left", weight="bold")
        axis.set_xlim(xs[0] - 0.1, xs[-1] + 1.75)
        axis.set_xticks(xs, [f"{one['length']:,}" for one in models[names[0]]])
        axis.set_xlabel("tokens")
        axis.set_ylabel("loss, bits per masked token")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure


def pictures() -> Iterable[tuple[str, Figure]]:
    yield "layer", layer()
    yield "forest", forest(claims(Runs()))
    yield "delays", delays(leads_in())
    found = json.loads((FIRST.parent / "extrapolation.json").read_text(encoding="utf-8"))
    yield "extrapolation", lengths(found["models"])


@click.command(cls=options.QuietCommand)
@click.option("--output", type=options.FOLDER, default=FOLDER,
              help="The folder of the pictures (default: docs/figures).")  # fmt: skip
def command(output):
    """Draw a layer and where encodings act in it, and from committed tables the results, delays and long inputs."""
    for name, figure in pictures():
        save(figure, output / f"{name}.png")
        click.echo(output / f"{name}.png")
