"""The pictures of the pages, from committed tables and models.

python -m lab pictures                   draw all of them into docs/figures
python -m lab pictures forest delays     only these
"""

import csv
import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tupe.common import options

from . import discovered, sketches
from .delay import curve_of
from .estimates import mean_interval
from .known import FIRST, Curve, Runs, step_ratios
from .plan import Trial, cooldown_of
from .plotting import BLUE, DASHES, GREY, INKS, MARKERS, NARROW, RED, SMALL, curves, name_lines, plt, save
from .recompute import BESIDE, CHANGES, CONTRASTS, verdicts_of_c, verdicts_of_d, verdicts_of_main

DOCS = FIRST.parent
FOLDER, MODELS = DOCS / "figures", DOCS.parent / "models"

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


# ------------------------------------------------------------------------------------------------ curves of training

INK = {model: (INKS[n], DASHES[n], MARKERS[n]) for n, model in enumerate(("bert_a", "tupe_a", "tupe_r", "bert_r"))}
INK |= {"tupe_a_from_1850": INK["tupe_a"], "bert_a_trained": (INKS[4], DASHES[3], MARKERS[4])}
NAMES = PLAIN | {"bert_a": "BERT-A", "tupe_a_from_1850": "TUPE-A, late", "bert_a_trained": "BERT-A, given p"}


def draw_curves(axis: Axes, found: dict[str, list[Curve]], beside: float, apart: float) -> None:
    """A line for each model, the mean of its seeds where all have a value, in a band over them; with its name."""
    ends = defaultdict(list)  # {last update: lines that end there}
    for model, of_seeds in found.items():
        colour, dash, _ = INK[model]
        last = min(updates[-1] for updates, _ in of_seeds)
        xs = np.array([x for x in of_seeds[0][0] if x <= last])
        losses = np.array([np.interp(xs, *curve) for curve in of_seeds])
        axis.plot(xs, losses.mean(0), color=colour, linestyle=dash, linewidth=1.5)
        axis.fill_between(xs, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
        ends[xs[-1] // (beside + 1)].append((losses.mean(0)[-1], NAMES[model], colour, xs[-1]))
    for lines in ends.values():
        name_lines(axis, [line[:3] for line in lines], max(line[3] for line in lines), beside, apart)


def of_stage(runs: Runs, stage: str, models: Iterable[str], updates: int) -> dict[str, list[tuple[Trial, Curve]]]:
    """{model: (run, its training losses) of each seed}"""
    trials = sorted(runs.planned(stage, updates), key=lambda trial: trial.seed)
    return {model: [(one, runs.curves[one]) for one in trials if one.model == model] for model in models}


LASTING = "bert_a", "tupe_a", "tupe_r"  # of the mini models that tell whether a lead lasts
MOVED = "bert_a", "tupe_a_from_1850", "bert_a_trained"  # of those whose exits were moved, and BERT-A
TRAINING = "training loss, bits per masked token"


def losses(runs: Runs) -> Figure:
    """Mini models at a constant rate with a cool-down: loss against updates."""
    found = of_stage(runs, "lasting", LASTING, 8000)
    figure, axis = curves(height=3.7)
    draw_curves(axis, {model: [curve for _, curve in pairs] for model, pairs in found.items()}, 250, 0.33)
    falls = 8000 - cooldown_of(found["bert_a"][0][0])
    axis.axvline(falls, color=GREY, linewidth=0.8)
    axis.text(falls - 100, 10.0, "from here on\nthe rate falls", ha="right", va="top", color=GREY, fontsize=SMALL)
    axis.text(900, 8.95, "the plateau: word order is hardly used", va="bottom", fontsize=SMALL)
    axis.set(xlim=(0, 9700), ylim=(4.2, 10.2), xlabel="updates", ylabel=TRAINING)
    axis.set_xticks(range(0, 8001, 2000), [f"{n:,}" for n in range(0, 8001, 2000)])
    return figure


def after_exits(
    runs: Runs, stage: str = "lasting", models: Iterable[str] = LASTING, updates: int = 8000
) -> dict[str, list[Curve]]:  # fmt: skip
    """The losses up to the cool-down, by updates past the exit of each run."""
    found = defaultdict(list)
    for model, pairs in of_stage(runs, stage, models, updates).items():
        for trial, _ in pairs:
            curve = curve_of(runs, trial)
            past = np.arange(0, curve.updates[-1] - curve.exit, 50)
            found[model].append((past.tolist(), np.interp(curve.exit + past, curve.updates, curve.losses).tolist()))
    return found


def aligned(runs: Runs) -> Figure:
    """As `losses`, but counted from each run's exit."""
    figure, axis = curves(height=3.2)
    draw_curves(axis, after_exits(runs), 250, 0.24)
    axis.set(xlim=(0, 7400), ylim=(4.7, 8.4), xlabel="updates since the model left its plateau", ylabel=TRAINING)
    axis.set_xticks(range(0, 6001, 1000), [f"{n:,}" for n in range(0, 6001, 1000)])
    return figure


def intervention(runs: Runs) -> Figure:
    """Mini models whose exits were moved: loss against updates, and against updates since the exit."""
    figure, (whole, past) = plt.subplots(2, 1, figsize=(NARROW, 6.4), layout="constrained")
    found = of_stage(runs, "delay", MOVED, 5000)
    draw_curves(whole, {model: [curve for _, curve in pairs] for model, pairs in found.items()}, 150, 0.33)
    whole.set(xlim=(0, 6900), ylim=(5.0, 10.2), xlabel="updates")
    whole.set_xticks(range(0, 5001, 1000), [f"{n:,}" for n in range(0, 5001, 1000)])
    moved = after_exits(runs, "delay", MOVED, 5000)
    points = min(len(updates) for of_seeds in moved.values() for updates, _ in of_seeds)  # as far as all go
    moved = {model: [(x[:points], y[:points]) for x, y in of_seeds] for model, of_seeds in moved.items()}
    draw_curves(past, moved, 100, 0.24)
    past.set(xlim=(0, 4140), ylim=(5.1, 8.4), xlabel="updates since the model left its plateau")
    past.set_xticks(range(0, 3001, 1000), [f"{n:,}" for n in range(0, 3001, 1000)])
    for axis in (whole, past):
        axis.set_ylabel(TRAINING)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure


SMOOTH = 10  # points of 50 updates that a mean runs over


def leads(runs: Runs) -> dict[str, list[Curve]]:
    """By how much each model is below BERT-A of the same seed, tiny, as running means over 500 updates."""
    found = of_stage(runs, "longer", ("bert_a", "bert_r", "tupe_a", "tupe_r"), 20000)
    bert = {trial.seed: values for trial, (_, values) in found.pop("bert_a")}
    lead = {}
    for model, pairs in found.items():
        lead[model] = []
        for trial, (updates, values) in pairs:
            gaps = np.convolve(np.subtract(bert[trial.seed], values), np.ones(SMOOTH) / SMOOTH, "valid")
            lead[model].append((updates[SMOOTH - 1 :], gaps.tolist()))
    return lead


def lead(runs: Runs) -> Figure:
    """The lead over BERT-A against updates."""
    figure, axis = curves(height=3.2)
    draw_curves(axis, leads(runs), 800, 0.17)
    axis.axhline(0, color="black", linewidth=0.9)
    axis.set(xlim=(0, 24500), ylim=(-0.1, 2.6), xlabel="updates", ylabel="ahead of BERT-A, bits per masked token")
    axis.set_xticks(range(0, 20001, 5000), [f"{n:,}" for n in range(0, 20001, 5000)])
    return figure


# --------------------------------------------------------------------------------------------- word order and its cost


def orders(runs: Runs) -> dict[str, Curve]:
    """{model: (updates, per cent of sentences that are preferred to copies with two words swapped)}, mini, seed 1."""
    found = defaultdict(lambda: ([], []))
    for row in runs.rows["measures"]:
        trial = Trial.parse(row["run"])
        if (trial.stage, row["measure"], row["part"]) == ("main", "along", "accuracy") and trial.model in INK:
            for column, value in zip(found[trial.model], (int(row["updates"]), 100 * float(row["value"])), strict=True):
                column.append(value)
    return dict(found)


def order(found: dict[str, Curve]) -> Figure:
    """Word order along training; names where the lines begin."""
    figure, axis = curves(height=3.0)
    for model, (xs, ys) in found.items():
        colour, dash, marker = INK[model]
        axis.plot(xs, ys, color=colour, linestyle=dash, marker=marker, markersize=4, linewidth=1.5)
    starts = [(ys[0], NAMES[model], INK[model][0]) for model, (_, ys) in found.items()]
    name_lines(axis, starts, 500, beside=-120, apart=4)
    axis.axhline(50, color=GREY, linewidth=0.8)
    axis.text(5000, 50.6, "chance", ha="right", color=GREY, fontsize=SMALL)
    axis.set(xlim=(-750, 5100), xlabel="updates", ylabel="original preferred, % of sentences")
    axis.set_xticks(range(0, 5001, 1000), [f"{n:,}" for n in range(0, 5001, 1000)])
    return figure


def costs(steps: dict[str, dict[str, np.ndarray]]) -> Figure:
    """The time of a step beside that without positions: median and range over turns, a row for each encoding, sorted by
    the medians of the last setting. steps: {setting: {encoding: ratio of each turn}}."""
    *_, last = steps.values()
    names = sorted(last, key=lambda name: np.median(last[name]))
    figure, axis = curves(height=0.185 * len(names) + 0.15 * len(steps) + 0.7)
    for n, (setting, within) in enumerate(steps.items()):
        colour, marker, aside = INKS[n % len(INKS)], MARKERS[n % len(MARKERS)], 0.25 * ((len(steps) - 1) / 2 - n)
        for row, name in enumerate(names):
            low, middle, high = np.quantile(within[name], (0, 0.5, 1))
            axis.plot([low, high], [row + aside] * 2, color=colour, linewidth=1)
            axis.plot(middle, row + aside, marker, color=colour, markersize=3.5)
        axis.text(middle, len(names) - 0.3 + 0.8 * n, setting, color=colour, ha="center", fontsize=SMALL)
    axis.axvline(1, color="black", linewidth=0.9, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(labelsize=SMALL)
    axis.set(ylim=(-0.7, len(names) - 0.3 + 0.8 * len(steps)), xlabel="time of a step, times that without positions")
    return figure


def name_of(label: str) -> str:
    """As the pages call it: "untied, [CLS] untied (TUPE-A)" is TUPE-A."""
    return label.rpartition(" (")[2].rstrip(")").replace("TUPE-A tie-cls", NAMES["tupe_a_tie_cls"])


def steps_of() -> dict[str, dict[str, np.ndarray]]:
    """What `costs` draws, of the committed measurement."""
    return {f"{length:,} tokens": {name_of(label): ratios for label, ratios in at.items()}
            for length, at in step_ratios().items()}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- trained models


def bias() -> Figure:
    from .properties import load_model, t5_bias, t5_figure  # which load torch

    folder = MODELS / "tupe_r_mini"
    return t5_figure(*t5_bias(load_model(folder, folder)[0]))


def correlations() -> Figure:
    """Of the words of this project's licence: a text that every clone has, and that does not change."""
    import torch

    from tupe.tokenization_tupe import TupeTokenizer

    from . import properties

    folder = MODELS / "bert_a_mini"
    words = (DOCS.parent / "LICENSE").read_text(encoding="utf-8")
    tokens = TupeTokenizer.from_pretrained(folder)(words, truncation=True, max_length=128)["input_ids"]
    model, _ = properties.load_model(folder, folder)
    return properties.correlations(properties.four_correlations(model, torch.tensor(tokens)))


# ---------------------------------------------------------------------------------------------------------- the command

tables = functools.cache(Runs)


def long_inputs() -> Figure:
    return lengths(json.loads((DOCS / "extrapolation.json").read_text(encoding="utf-8"))["models"])


PICTURES: dict[str, Callable[[], Figure]] = {
    "idea": sketches.idea,
    "layer": sketches.layer,
    "discovery": lambda: discovered.draw(discovered.entries()),
    "discovery_lengths": lambda: discovered.draw_lengths(discovered.entries()),
    "losses": lambda: losses(tables()),
    "aligned": lambda: aligned(tables()),
    "intervention": lambda: intervention(tables()),
    "lead": lambda: lead(tables()),
    "delays": lambda: delays(leads_in()),
    "forest": lambda: forest(claims(tables())),
    "order": lambda: order(orders(tables())),
    "extrapolation": long_inputs,
    "costs": lambda: costs(steps_of()),
    "bias": bias,
    "correlations": correlations,
}


@click.command(cls=options.QuietCommand)
@click.argument("names", nargs=-1, type=click.Choice(list(PICTURES)))
@click.option("--output", type=options.FOLDER, default=FOLDER,
              help="The folder of the pictures (default: docs/figures).")  # fmt: skip
def command(names, output):
    """Draw the pictures of the pages from committed tables and models: those named, or all.

    Those of the gallery need the models that it shows: python -m lab gallery.
    """
    for name in names or PICTURES:
        save(PICTURES[name](), output / f"{name}.png")
        click.echo(output / f"{name}.png")
