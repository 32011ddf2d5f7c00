"""The figures of the first protocol's pages. Each takes the tables of a whole experiment."""

import textwrap
from collections import defaultdict

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tupe.common import plotting
from tupe.evaluation import figures

from .claims import CLAIMS, COMPARED, Judged, judged, pairs_accuracy
from .delay import leads
from .evidence import Evidence
from .plan import PLAN, Trial
from .second_page import Runs
from .second_plan import cooldown_of

SHOWN = ("main", "slower", "controls")  # stages that the contrasts are drawn of
TITLES = {"main": "main stage", "slower": "one learning rate"}  # of stages, instead of the name


def loss(evidence: Evidence) -> Figure:
    """Training loss against updates, mean over seeds with a band from the lowest to the highest: the paper's 5a. Of the
    controls, only the models of the contrasts."""
    drawn = {
        stage: [trial for trial in evidence.trials(stage) if stage != "controls" or trial.model in {*COMPARED, "nopos"}]
        for stage in (*SHOWN, "longer")
    }
    figure, axes = plotting.curves(len(drawn), rows=1 + len(drawn) // 4)
    for (stage, trials), axis in zip(drawn.items(), axes, strict=True):
        for model in dict.fromkeys(trial.model for trial in trials):
            lines = [evidence.curve(trial) for trial in trials if trial.model == model]
            band(axis, model, lines)
        label = f"nopos's final loss - {PLAN['threshold']:g}"
        axis.axhline(evidence.threshold(stage), color="0.5", linewidth=0.8, label=label)
        axis.set(xlabel="updates", title=f"{TITLES.get(stage, stage)}, {trials[0].size}", ylim=(None, 11))
        axis.set_ylabel("training loss (bits per masked token)")
    plotting.legend(figure, columns=3)
    return figure


def lasting(evidence: Evidence) -> Figure:
    """Training loss of tiny models against updates, on a logarithmic axis: the plateau, who leaves it when, and how
    near the losses are in the end. One colour per model, seeds as a band; without positions, from the shorter stage."""
    figure, (axis,) = plotting.curves(width=6.4, height=3.4)
    for model, name in CLAIMS["names"].items():
        trials = [trial for trial in evidence.trials("longer") if trial.model == model]
        trials = trials or [trial for trial in evidence.trials("controls") if trial.model == model == "nopos"]
        if trials:
            band(axis, model, [evidence.curve(trial) for trial in trials], label=name, linewidth=1.6)
    axis.annotate("the plateau: word order\nis hardly used yet", (1100, 8.85), (900, 9.9), fontsize=8, ha="center",
                  arrowprops={"arrowstyle": "-", "color": "0.5"})  # fmt: skip
    axis.set(xscale="log", xlim=(100, 21000), ylim=(4.3, 10.6), xlabel="updates (logarithmic)")
    ticks = [100, 300, 1000, 3000, 10000, 20000]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylabel("training loss (bits per masked token)")
    axis.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def aligned(_: Evidence) -> Figure:
    """Training loss of mini models at a constant rate, against updates and against updates after each model's exit: a
    delay alone would bring the curves together."""
    figure, axes = plotting.curves(2, width=4.4, height=3.2, sharey=True)
    runs = Runs()
    found = [one for one in leads(runs) if one.run.stage == "lasting"]
    for model in dict.fromkeys(one.run.model for one in found):
        shifted = defaultdict(list)
        for one in (one for one in found if one.run.model == model):
            updates, losses = runs.curves[one.run]
            kept = range(50, one.run.updates - cooldown_of(one.run) + 1, 50)
            since = range(0, int(kept[-1] - one.exit), 50)
            shifted[0].append((list(kept), list(np.interp(kept, updates, losses))))
            shifted[1].append((list(since), list(np.interp([one.exit + n for n in since], updates, losses))))
        for axis, lines in zip(axes, shifted.values(), strict=True):
            band(axis, model, lines, label=CLAIMS["names"][model], linewidth=1.4)
    axes[0].set(xlabel="updates", ylabel="training loss (bits per masked token)", ylim=(4.8, 9.5))
    axes[1].set(xlabel="updates after the exit from the plateau")
    plotting.legend(figure, columns=3)
    return figure


def gains(evidence: Evidence) -> Figure:
    """How far ahead of BERT-A tiny models are: along trainings of 20,000 updates, and at the end of trainings of either
    length. Seeds share data and masks, so their losses can be subtracted update by update."""
    figure, (axis,) = plotting.curves(width=6.4, height=3.4)
    finals = {PLAN["stages"][stage]["updates"]: evidence.finals(stage) for stage in ("controls", "longer")}
    for model in ("bert_r", "tupe_a", "tupe_r"):
        lines = []
        for trial in (trial for trial in evidence.trials("longer") if trial.model == model):
            (base,) = (one for one in evidence.trials("longer") if (one.model, one.seed) == ("bert_a", trial.seed))
            (updates, losses), (_, behind) = evidence.curve(trial), evidence.curve(base)
            smooth = np.convolve(np.subtract(behind, losses), np.ones(5) / 5, "valid")
            lines.append((updates[2:-2], list(smooth)))
        band(axis, model, lines, label=CLAIMS["names"][model], linewidth=1.2)
        for shift, (updates, losses) in enumerate(finals.items()):
            seeds = losses[model].keys() & losses["bert_a"].keys()
            values = [losses["bert_a"][seed] - losses[model][seed] for seed in sorted(seeds)]
            place = updates * (0.97, 1.03)[shift]
            colour = plotting.of_model(model)["color"]
            axis.plot([place] * len(values), values, "D", color=colour, markersize=5, markeredgecolor="white", zorder=5)
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.annotate("trained for 5,000", (4850, 1.0), (2000, 0.35), fontsize=8, ha="center",
                  arrowprops={"arrowstyle": "-", "color": "0.5"})  # fmt: skip
    axis.annotate("trained for 20,000", (20600, 0.1), (12000, 0.75), fontsize=8, ha="center",
                  arrowprops={"arrowstyle": "-", "color": "0.5"})  # fmt: skip
    axis.set(xscale="log", xlim=(100, 24000), xlabel="updates (logarithmic)")
    ticks = [100, 300, 1000, 3000, 5000, 10000, 20000]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylabel("lead over BERT-A (bits per masked token)")
    title = "lines: along 20,000 updates\ndiamonds: final losses, a seed each"
    axis.legend(fontsize=8, frameon=False, loc="upper left", title=title, title_fontsize=7.5)
    return figure


def band(axis: Axes, model: str, lines: list, **look) -> None:
    """Mean of lines (x, y) that share their x, and the range between their lowest and highest. `nopos` hides none."""
    lines = [line for line in lines if line[0]]
    x = sorted(set.intersection(*(set(line[0]) for line in lines)))
    values = np.array([[dict(zip(*line, strict=True))[point] for point in x] for line in lines])
    look = {"label": model, **plotting.of_model(model), "marker": None if len(x) > 20 else "o", **look}
    axis.plot(x, values.mean(0), zorder=2 if model == "nopos" else 3, **look)
    axis.fill_between(x, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0)


def along(evidence: Evidence) -> Figure:
    """Order sensitivity and minimal pairs along training: the paper's 5b, for what needs no fine-tuning."""
    trials = evidence.trials("main")

    def order(trial):
        rows = [row for row in evidence.measures(trial, "along") if row["part"] == "accuracy"]
        rows.sort(key=lambda row: int(row["updates"]))
        return [int(row["updates"]) for row in rows], [100 * float(row["value"]) for row in rows]

    def pairs(only_order):
        def line(trial):
            updates = sorted({int(row["updates"]) for row in evidence.rows["pairs"][str(trial)]})
            scored = {update: pairs_accuracy(evidence, trial, update, only_order) for update in updates}
            scored = {update: 100 * value for update, value in scored.items() if value is not None}
            return list(scored), list(scored.values())

        return line

    figure, axes = plotting.curves(3, width=3.4)
    panels = {"original preferred to swap": order, "BLiMP, all": pairs(False), "BLiMP, only order": pairs(True)}
    for axis, (title, line) in zip(axes, panels.items(), strict=True):
        for model in dict.fromkeys(trial.model for trial in trials):
            band(axis, model, [line(trial) for trial in trials if trial.model == model])
        axis.axhline(50, color="0.5", linewidth=0.8)
        seeds = sorted({trial.seed for trial in trials if line(trial)[0]})
        axis.set(xlabel="updates", title=f"{title} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})")
    axes[0].set_ylabel("%")
    plotting.legend(figure, columns=3)
    return figure


def contrasts(evidence: Evidence) -> Figure:
    """Mean and 95 % interval of each contrast, and every seed: a line for each stage."""
    stages = {stage: judged(evidence, stage) for stage in SHOWN}
    every = stages["main"]
    figure, (axis,) = plotting.curves(width=7.2, height=0.9 + len(every) * (0.25 + 0.2 * len(stages)))
    for index, (stage, results) in enumerate(stages.items()):
        colour = plotting.COLOURS[1:][index]
        label = f"{TITLES.get(stage, stage)}, {PLAN['stages'][stage]['size']} models"
        for row, result in enumerate(results):
            one, y = result.contrast, row + index / (1 + len(stages))
            differences = list(one.differences.values())
            axis.plot(differences, [y + 0.1] * len(differences), "o", color=colour, markersize=3)
            if one.interval:
                axis.plot(one.interval, [y, y], color=colour, linewidth=2, marker="|", markersize=8)
            axis.plot(one.mean, y, "D", color="black", markersize=3.5)
            place = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "va": "center", "color": colour}
            axis.annotate(result.verdict, (1.01, y), **place)
        axis.plot([], [], color=colour, linewidth=2, marker="|", label=label)
    axis.axvline(0, color="0.5", linewidth=0.8)
    middle = (len(stages) - 1) / 2 / (1 + len(stages))
    axis.set_yticks([row + middle for row in range(len(every))], [labelled(result) for result in every])
    axis.set_ylim(len(every) - 0.25, -0.25)  # the first one on top
    axis.set_xlabel("final loss of the first model minus the second's (bits per masked token); dots: seeds")
    axis.grid(axis="y", visible=False)
    plotting.legend(figure, columns=3)
    return figure


def labelled(result: Judged) -> str:
    """What a contrast changes, in words, and its models."""
    return f"{textwrap.fill(result.claim, 24)}\n({result.a} - {result.b})"


def positional(evidence: Evidence) -> Figure:
    """Positional logits of the heads of a trained TUPE-A: the paper's figure 6."""
    runs = {row["run"] for row in evidence.tables["positional"]}
    run = max(runs, key=lambda name: Trial.parse(name).stage == "main")
    rows = [row for row in evidence.tables["positional"] if row["run"] == run]
    heads = max(int(row["head"]) for row in rows) + 1
    logits = np.array([[float(value) for value in row["logits"].split()] for row in rows])
    trial = Trial.parse(run)
    figure = figures.positional(torch.from_numpy(logits).view(heads, -1, logits.shape[1]))
    figure.suptitle(f"{trial.model}, {trial.size}, {trial.updates:,} updates at {trial.lr:g} (seed {trial.seed})")
    return figure


def cls(evidence: Evidence) -> Figure:
    """Attention of [CLS] to the first positions over uniform: a point per head of every layer and seed."""
    trials = [trial for trial in evidence.trials("main") if evidence.measures(trial, "cls attention")]
    figure, (axis,) = plotting.curves()
    models = list(dict.fromkeys(trial.model for trial in trials))
    layers = sorted({int(row["part"].split(".")[0]) for row in evidence.measures(trials[0], "cls attention")})
    for number in layers:
        points = [
            (models.index(trial.model) + 0.15 * (number - np.mean(layers)), float(row["value"]))
            for trial in trials
            for row in evidence.measures(trial, "cls attention")
            if row["part"].startswith(f"{number}.")
        ]
        look = {**plotting.style(number), "linestyle": "none", "alpha": 0.7}
        axis.plot(*zip(*points, strict=True), label=f"layer {number}", **look)
    axis.axhline(1, color="0.5", linewidth=0.8)
    axis.set_title(f"main stage, {trials[0].size}; a point per head and seed")
    axis.set_xticks(range(len(models)), models, rotation=20)
    axis.set_ylabel("attention of [CLS] to the\nfirst 8 positions / uniform")
    plotting.legend(figure, columns=4)
    return figure


def scale(evidence: Evidence) -> Figure:
    """Final loss at tiny size against the scale of p."""
    finals = evidence.finals("controls")
    figure, (axis,) = plotting.curves()
    for index, (label, points) in enumerate(CLAIMS["scales"].items()):
        for number, (model, sd) in enumerate(points):
            values, look = list(finals[model].values()), {**plotting.style(index), "linestyle": "none"}
            axis.plot([sd] * len(values), values, label=label if number == 0 else None, **look)
            axis.annotate(model, (sd, np.mean(values)), xytext=(5, 0), textcoords="offset points", fontsize=7)
        # the line takes the first model of a scale
        means = {sd: float(np.mean(list(finals[model].values()))) for model, sd in reversed(points)}
        axis.plot(*zip(*sorted(means.items()), strict=True), **{**plotting.style(index), "marker": None})
    axis.set(xscale="log", xlabel="standard deviation of p at the start", ylabel="final loss (bits), every seed")
    axis.set_xlim(0.013, 4)
    plotting.legend(figure, columns=2)
    return figure


def learning_rates(evidence: Evidence) -> Figure:
    """Final loss of the pilot against the learning rate: the models of the main stage, and the controls."""
    trials = evidence.trials("pilot")
    rates = sorted({trial.lr for trial in trials})
    main = PLAN["stages"]["main"]["models"]
    figure, axes = plotting.curves(2, width=3.8, height=4.6, sharey=True)
    for axis, of_main in zip(axes, (True, False), strict=True):
        for index, model in enumerate(name for name in PLAN["models"] if (name in main) == of_main):
            points = sorted((trial.lr, evidence.loss(trial)) for trial in trials if trial.model == model)
            look = plotting.of_model(model) if of_main else plotting.style(index)
            axis.plot(*zip(*points, strict=True), label=model, **look)
        axis.set(xscale="log", xlabel="learning rate", title=f"pilot, {trials[0].size}, {trials[0].updates:,} updates")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.15))
    axes[0].set_ylabel("final loss (bits per masked token)")
    return figure


FIGURES = (aligned, lasting, gains, loss, along, contrasts, positional, cls, scale, learning_rates)
