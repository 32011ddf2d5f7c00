"""The page and the figures of the experiment on TUPE's claims, and the command `tupe claims`, which makes them of the
compressed tables in docs/evidence alone."""

import os
from pathlib import Path

import click
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common import options, plotting
from ..common.record import write_atomically
from ..common.tables import Table
from ..evaluation import figures
from . import claims, claims_tables, collect
from .claims import Evidence
from .plan import CLAIMS, Trial, lengths_of

BEGIN, END = "<!-- results: written by `tupe claims`, not by hand -->", "<!-- end of the results -->"
EVIDENCE = Path("docs/evidence")
TITLES = {"first": "first look", "main": "main stage", "slower": "one learning rate"}  # of stages, instead of the name

# --------------------------------------------------------------------------------------------------------- the figures
# Each returns None where too little of what it shows has run.


def loss(evidence: Evidence) -> Figure | None:
    """Training loss against updates, mean over seeds with a band from the lowest to the highest: the paper's 5a. Of the
    controls, the models of the contrasts alone."""
    stages = [stage for stage in (*claims.stages_to_show(evidence), "longer") if evidence.trials(stage)]
    if not stages:
        return None
    figure, axes = plotting.curves(len(stages), rows=1 + len(stages) // 4)
    compared = claims.compared_models() | {"nopos"}
    drawn = {
        stage: [trial for trial in evidence.trials(stage) if stage != "controls" or trial.model in compared]
        for stage in stages
    }
    looks = looks_of([trial for trials in drawn.values() for trial in trials])
    for (stage, trials), axis in zip(drawn.items(), axes, strict=True):
        for model in dict.fromkeys(trial.model for trial in trials):
            lines = [evidence.curve(trial) for trial in trials if trial.model == model]
            band(axis, model, lines, looks[model])
        if evidence.threshold(stage) is not None:
            label = f"nopos's final loss - {CLAIMS['threshold']:g}"
            axis.axhline(evidence.threshold(stage), color="0.5", linewidth=0.8, label=label)
        axis.set(xlabel="updates", title=f"{TITLES.get(stage, stage)}, {trials[0].size}", ylim=(None, 11))
        axis.set_ylabel("training loss (bits per masked token)")
    plotting.legend(figure, columns=3)
    return figure


def looks_of(trials: list[Trial]) -> dict[str, dict]:
    """{model: what its line looks like}, all different in a figure of up to nine models; the first lie on top, so that
    `nopos` hides none."""
    there = {trial.model for trial in trials}
    models = [model for model in CLAIMS["models"] if model in there]
    return {model: {**plotting.style(n), "zorder": 3 - n / 100} for n, model in enumerate(models)}


def band(axis: Axes, model: str, lines: list, look: dict) -> None:
    """Mean of lines (x, y) that share their x, and the range between their lowest and highest."""
    lines = [line for line in lines if line[0]]
    if not lines:
        return
    x = sorted(set.intersection(*(set(line[0]) for line in lines)))
    values = np.array([[dict(zip(*line, strict=True))[point] for point in x] for line in lines])
    look = {**look, "marker": None if len(x) > 20 else "o"}
    axis.plot(x, values.mean(0), label=model, **look)
    axis.fill_between(x, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0)


def along(evidence: Evidence) -> Figure | None:
    """Order sensitivity and minimal pairs along training: the paper's 5b, for what needs no fine-tuning."""
    trials = evidence.trials("main")
    if not any(evidence.measures(trial, "along") for trial in trials):
        return None

    def order(trial):
        rows = [row for row in evidence.measures(trial, "along") if row["part"] == "accuracy"]
        rows.sort(key=lambda row: int(row["updates"]))
        return [int(row["updates"]) for row in rows], [100 * float(row["value"]) for row in rows]

    def pairs(only_order):
        def line(trial):
            updates = sorted({int(row["updates"]) for row in evidence.rows["pairs"][str(trial)]})
            scored = {update: evidence.pairs_accuracy(trial, update, only_order) for update in updates}
            scored = {update: 100 * value for update, value in scored.items() if value is not None}
            return list(scored), list(scored.values())

        return line

    figure, axes = plotting.curves(3, width=3.4)
    looks = looks_of(trials)
    panels = {"original preferred to swap": order, "BLiMP, all": pairs(False), "BLiMP, only order": pairs(True)}
    for axis, (title, line) in zip(axes, panels.items(), strict=True):
        for model in dict.fromkeys(trial.model for trial in trials):
            band(axis, model, [line(trial) for trial in trials if trial.model == model], looks[model])
        axis.axhline(50, color="0.5", linewidth=0.8)
        seeds = sorted({trial.seed for trial in trials if line(trial)[0]})
        axis.set(xlabel="updates", title=f"{title} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})")
    axes[0].set_ylabel("%")
    plotting.legend(figure, columns=3)
    return figure


def contrasts(evidence: Evidence) -> Figure | None:
    """Mean and 95 % interval of each contrast, and every seed: a line for each stage."""
    stages = {stage: evidence.judged(stage) for stage in claims.stages_to_show(evidence)}
    stages = {stage: results for stage, results in stages.items() if any(one.contrast for one in results)}
    if not stages:
        return None
    every = next(iter(stages.values()))
    figure, (axis,) = plotting.curves(width=7.2, height=0.9 + len(every) * (0.25 + 0.2 * len(stages)))
    for index, (stage, results) in enumerate(stages.items()):
        colour = plotting.COLOURS[1:][index]
        label = f"{TITLES.get(stage, stage)}, {CLAIMS['stages'][stage]['size']} models"
        for row, result in enumerate(results):
            one, y = result.contrast, row + index / (1 + len(stages))
            if one is None:
                continue
            axis.plot(list(one.differences.values()), [y + 0.1] * one.seeds, "o", color=colour, markersize=3)
            if one.interval:
                axis.plot(one.interval, [y, y], color=colour, linewidth=2, marker="|", markersize=8)
            axis.plot(one.mean, y, "D", color="black", markersize=3.5)
            place = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "va": "center", "color": colour}
            axis.annotate(result.verdict, (1.01, y), **place)
        axis.plot([], [], color=colour, linewidth=2, marker="|", label=label)
    axis.axvline(0, color="0.5", linewidth=0.8)
    middle = (len(stages) - 1) / 2 / (1 + len(stages))
    axis.set_yticks([row + middle for row in range(len(every))], [f"{result.a} - {result.b}" for result in every])
    axis.set_ylim(len(every) - 0.25, -0.25)  # the first one on top
    axis.set_xlabel("final loss of the first model minus the second's (bits per masked token); dots: seeds")
    axis.grid(axis="y", visible=False)
    plotting.legend(figure, columns=3)
    return figure


def positional(evidence: Evidence) -> Figure | None:
    """Positional logits of the heads of a trained TUPE-A: the paper's figure 6."""
    runs = {row["run"] for row in evidence.tables["positional"]}
    if not runs:
        return None
    run = max(runs, key=lambda name: Trial.parse(name).stage == "main")
    rows = [row for row in evidence.tables["positional"] if row["run"] == run]
    heads = max(int(row["head"]) for row in rows) + 1
    logits = np.array([[float(value) for value in row["logits"].split()] for row in rows])
    trial = Trial.parse(run)
    title = f"{trial.model}, {trial.size}, {trial.updates:,} updates at {trial.lr:g} (seed {trial.seed})"
    return figures.positional(torch.from_numpy(logits).view(heads, -1, logits.shape[1]), title)


def cls(evidence: Evidence) -> Figure | None:
    """Attention of [CLS] to the first positions over uniform: a point per head of every layer and seed."""
    trials = [trial for trial in evidence.trials("main") if evidence.measures(trial, "cls attention")]
    if not trials:
        return None
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


def scale(evidence: Evidence) -> Figure | None:
    """Final loss at tiny size against the scale of p."""
    finals, drawn = evidence.finals("controls"), False
    figure, (axis,) = plotting.curves()
    for index, (label, points) in enumerate(CLAIMS["scales"].items()):
        here = [(model, sd) for model, sd in points if model in finals]
        for number, (model, sd) in enumerate(here):
            values, look = list(finals[model].values()), {**plotting.style(index), "linestyle": "none"}
            axis.plot([sd] * len(values), values, label=label if number == 0 else None, **look)
            axis.annotate(model, (sd, np.mean(values)), xytext=(5, 0), textcoords="offset points", fontsize=7)
        # the line takes the first model of a scale
        means = {sd: float(np.mean(list(finals[model].values()))) for model, sd in reversed(here)}
        drawn = drawn or len(means) > 1  # one scale alone shows nothing
        if means:
            axis.plot(*zip(*sorted(means.items()), strict=True), **{**plotting.style(index), "marker": None})
    if not drawn:
        plt.close(figure)
        return None
    axis.set(xscale="log", xlabel="standard deviation of p at the start", ylabel="final loss (bits), every seed")
    axis.set_xlim(0.013, 4)
    plotting.legend(figure, columns=2)
    return figure


def learning_rates(evidence: Evidence) -> Figure | None:
    """Final loss of the pilot against the learning rate: the models of the main stage, and the controls."""
    trials = evidence.trials("pilot")
    rates = sorted({trial.lr for trial in trials})
    if len(rates) < 2:
        return None
    main = CLAIMS["stages"]["main"]["models"]
    groups = sorted({trial.model in main for trial in trials}, reverse=True)
    figure, axes = plotting.curves(len(groups), width=3.8, height=4.6, sharey=True)
    for axis, of_main in zip(axes, groups, strict=True):
        for index, model in enumerate(name for name in CLAIMS["models"] if (name in main) == of_main):
            points = sorted((trial.lr, evidence.loss(trial)) for trial in trials if trial.model == model)
            if points:
                axis.plot(*zip(*points, strict=True), label=model, **plotting.style(index))
        axis.set(xscale="log", xlabel="learning rate", title=f"pilot, {trials[0].size}, {trials[0].updates:,} updates")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.15))
    axes[0].set_ylabel("final loss (bits per masked token)")
    return figure


EXPLORATORY = (
    "Exploratory, intervals over seeds. Order: of held-out sentences, the share that the model prefers to the same "
    "with two adjacent words swapped, and the mean difference of their pseudo-log-likelihoods; [CLS]: its attention to "
    "the first eight positions over uniform attention, at most 16, mean over heads and layers (geometric over seeds; "
    "the interval knows no bound).\n"
)
FIGURES = (loss, along, contrasts, positional, cls, scale, learning_rates)


def draw(evidence: Evidence, folder: Path) -> list[str]:
    """Write claims_<name>.png of every figure that there is something to draw for, and delete the others; returns the
    names."""
    drawn = []
    for figure in FIGURES:
        content, path = figure(evidence), folder / f"claims_{figure.__name__}.png"
        if content is not None:
            plotting.save(content, path)
            drawn.append(figure.__name__)
        else:
            path.unlink(missing_ok=True)
    return drawn


# ------------------------------------------------------------------------------------------------------------ the page


def results(evidence: Evidence, drawn: list[str], folder: str, tables: str) -> str:
    """The results as Markdown. drawn: figures that are there; folder, tables: where the figures are, and `PAGES`, as
    this page names them."""

    def figure(name, text):
        return f"![{text}]({folder}/claims_{name}.png)\n" if name in drawn else ""

    def section(stage, *blocks):
        """The blocks, if anything of the stage has run."""
        return blocks if evidence.trials(stage) else ()

    def table_of(stage):
        return claims_tables.stage_table(evidence, stage).markdown()

    stages = [stage for stage in ("main", "slower", "controls", "longer") if evidence.threshold(stage) is not None]
    slow = [f"{', '.join(names)} ({stage})" for stage in stages if (names := claims.late(evidence, stage))]
    unknown = " Exit updates wait for `nopos`, whose pilot is not complete."
    blocks = [
        claims_tables.coverage(evidence) + (threshold_text(evidence, "main") or unknown) + "\n",
        f"More than half of the updates on the plateau, with some seed (`nopos` aside): {'; '.join(slow)}.\n"
        if slow
        else "",
        figure("contrasts", "five contrasts with every seed"),
        figure("loss", "loss against updates, bands over seeds"),
        *section(
            "main",
            "### Main stage, mini: the five contrasts\n",
            "Final losses in bits per masked token, differences paired by pre-training seed.\n",
            claims_tables.contrast_table(evidence, "main").markdown(),
            "### Main stage: final losses\n",
            table_of("main"),
            claims_tables.text_error(evidence),
            *changes(evidence, "main"),
        ),
        *one_rate(evidence),
        *sensitivity(evidence),
        *since_exit(evidence),
        *shares(evidence),
        *further(evidence, tables),
        figure("scale", "loss against the scale of p"),
        figure("learning_rates", "loss against learning rate"),
        figure("along", "order sensitivity and minimal pairs along training"),
        figure("cls", "attention of [CLS]"),
        "### Positional logits of TUPE-A\n" if "positional" in drawn else "",
        figure("positional", "positional logits of the heads of TUPE-A"),
    ]
    return "\n".join(block for block in blocks if block)


def further(evidence: Evidence, tables: str) -> list[str]:
    """Links to the pages of the stages that have run."""
    told = {
        "controls": "Controls, tiny: changes of one thing each, and the five contrasts at this size",
        "longer": f"Longer, tiny: {lengths_of('longer')[0]:,} updates",
        "main": "Main stage: order sensitivity, minimal pairs, [CLS], losses by position and by length",
        "pilot": "Learning rates: losses of the pilot",
        "first": "The first look: early training only",
    }
    links = [f"- {text} ([page]({tables}/{stage}.md))" for stage, text in told.items() if evidence.trials(stage)]
    return ["### Further pages, all exploratory\n", "\n".join(links) + "\n"] if links else []


def threshold_text(evidence: Evidence, stage: str) -> str:
    """A sentence, or "" where the threshold of a stage is not known."""
    value = evidence.threshold(stage)
    return "" if value is None else f" The threshold of the exit updates is {value:.3f} bits."


def first_page(evidence: Evidence) -> str:
    """The stage `first` as a page."""
    plan = CLAIMS["stages"]["first"]
    blocks = [
        "# The first look\n",
        f"Early training only: {plan['size']}, {plan['updates']:,} updates at the learning rate {plan['lr']:g} for "
        f"all, which nobody tuned.{threshold_text(evidence, 'first')} Written by `tupe claims`. The five contrasts, in "
        "bits per masked token, paired by seed:\n",
        claims_tables.contrast_table(evidence, "first").markdown(),
        claims_tables.stage_table(evidence, "first", against="changed").markdown(),
        *changes(evidence, "first"),
        EXPLORATORY,
        claims_tables.exploratory_table(evidence, "first").markdown(),
    ]
    return "\n".join(blocks)


def one_rate(evidence: Evidence) -> list[str]:
    """The section on the stage `slower`, once any of its own models has run."""
    trials = evidence.trials("slower")
    if all(trial.stage != "slower" for trial in trials):
        return []
    rates = " and ".join(f"{lr:g}" for lr in sorted({trial.lr for trial in trials}))
    included = ", ".join(f"`{model}`" for model in CLAIMS["stages"]["slower"]["includes"]["main"])
    return [
        "### One learning rate for all, mini\n",
        f"All models at {rates} ({included}: their runs of the main stage). Exploratory: it decides no claim.\n",
        claims_tables.contrast_table(evidence, "slower").markdown(),
        claims_tables.stage_table(evidence, "slower", against="main").markdown(),
        *changes(evidence, "slower"),
    ]


def sensitivity(evidence: Evidence) -> list[str]:
    """The section on other tests than the protocol's."""
    table = claims_tables.sensitivity_table(evidence)
    if not table.rows:
        return []
    return [
        "### The same contrasts by other tests\n",
        "p-values, corrected by Holm for five. The protocol's verdicts are those of the first column and stand. Welch: "
        "seeds not paired, variances may differ. Pooled: not paired, one variance for the models of the contrasts. The "
        "other held-out sample is the 100,000 tokens of validation. An exploratory contrast is called *lower* or "
        "*higher* only if the paired tests on both samples and Welch's agree.\n",
        table.markdown(),
    ]


def since_exit(evidence: Evidence) -> list[str]:
    """The section on the protocol's second outcome."""
    table = claims_tables.after_exit_table(evidence)
    if not table.rows:
        return []
    return [
        "### Equal numbers of updates after the exit\n",
        "The protocol's second outcome: training losses as many updates after each model's own exit as all have, in "
        "bits, paired by seed. A model that leaves the plateau late is nearer to the end of the decay then, which "
        "favours BERT-A. *Left*: of the difference of final (held-out) losses.\n",
        table.markdown(),
    ]


def shares(evidence: Evidence) -> list[str]:
    """The section on shares of updates, if the models to compare have run at any size."""
    table = claims_tables.share_table(evidence)
    if not table.rows:
        return []
    return [
        "### Share of updates\n",
        "Of BERT-A's updates, after which a model has BERT-A's final masked-LM loss (the paper's 30 % is about GLUE): "
        "geometric mean over seeds, interval from three seeds on, and in brackets every seed.\n",
        table.markdown(),
    ]


def changes(evidence: Evidence, stage: str) -> list[str]:
    """Other differences than the contrasts, of the models that have run."""
    rows = claims_tables.change_rows(evidence, stage)
    if not rows:
        return []
    header = ["change", "difference", "mean [95 % interval]", "interval is"]
    title = "Exploratory differences, not corrected for their number:\n"
    return [title, Table.plain(header, rows, align="llrl").markdown()]


def pilot_page(evidence: Evidence) -> str:
    """The losses of the pilot as a page."""
    text = (
        "# Learning rates\n\nFinal losses of the pilot (tiny, bits per masked token) by learning rate; each model runs "
        "at its best one (bold, once half and twice of it have run) in the controls, `longer` and `share`. Written by "
        f"`tupe claims`.\n\n{claims_tables.rates_table(evidence).markdown()}"
    )
    if evidence.trials("rates"):
        size = CLAIMS["stages"]["rates"]["size"]
        text += (
            f"\nAt the size of the main stage, {size}, by the share of the pilot's rate; the share with the lowest "
            f"mean is the main stage's:\n\n{claims_tables.rate_shares_table(evidence).markdown()}"
        )
    return text


def main_page(evidence: Evidence) -> str:
    """What was measured beside the final losses of the main stage, as a page."""
    blocks = [
        "# The main stage: what else was measured\n\nWritten by `tupe claims`.\n",
        f"{EXPLORATORY}{claims_tables.pair_errors(evidence)} Losses after the exit are at different points of the "
        "decay: a model that leaves the plateau late is nearer to the end of it. Times are those of a machine with "
        "other work: what stands at equal time is rough.\n",
        claims_tables.exploratory_table(evidence, "main").markdown(),
        "## Losses by position and by length\n\nBits per masked token, by the position of that token, "
        "and by the length of its block; means over seeds, where there are at least 500, ± half the width of the 95 % "
        "t-interval. Position 0 is `<s>`, masked like any token.\n",
        claims_tables.parts_table(evidence).markdown(),
    ]
    return "\n".join(blocks)


def longer_page(evidence: Evidence) -> str:
    """The stage `longer` as a page."""
    most = lengths_of("longer")[0] // lengths_of("controls")[0]
    blocks = [
        f"# Longer training\n\nTiny models after {lengths_of('longer')[0]:,} updates, {most} times as many as those of "
        "the controls. It decides no claim. Written by `tupe claims`.\n",
        claims_tables.contrast_table(evidence, "longer").markdown(),
        claims_tables.stage_table(evidence, "longer").markdown(),
        *changes(evidence, "longer"),
    ]
    return "\n".join(blocks)


def controls_page(evidence: Evidence) -> str:
    """The controls as a page."""
    blocks = [
        "# The controls\n\nTiny models, bits per masked token. Written by `tupe claims`. The "
        "five contrasts at this size decide no claim:\n",
        claims_tables.contrast_table(evidence, "controls").markdown(),
        claims_tables.stage_table(evidence, "controls", against="changed").markdown(),
        *(text for f in (claims_tables.pilot_text, claims_tables.scale_text) if (text := f(evidence))),
        *changes(evidence, "controls"),
        EXPLORATORY,
        claims_tables.exploratory_table(evidence, "controls").markdown(),
    ]
    return "\n".join(blocks)


# By stage, in the tables' folder.
PAGES = {
    "pilot": pilot_page, "first": first_page, "controls": controls_page, "main": main_page, "longer": longer_page,
}  # fmt: skip


def fill_in(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page. Raises ValueError if they are not there."""
    content = page.read_text(encoding="utf-8")
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}, once each")
    before, _, rest = content.partition(BEGIN)
    after = rest.partition(END)[2]
    write_atomically(page, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


@click.command(cls=options.QuietCommand)
@click.option(
    "--runs", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True,
    help="folder of `tupe evidence`, added first; repeatable",
)  # fmt: skip
@click.option(
    "--evidence", "folder", type=options.FOLDER, default=EVIDENCE, show_default=True,
    help="folder of the compressed tables",
)  # fmt: skip
@click.option(
    "--page", type=options.FILE,
    help="page whose results are written anew; its figures go into figures/ beside it (default: docs/results.md; of "
    "tables of your own, results.md beside them)",
)  # fmt: skip
@click.option(
    "--readme", type=options.FILE,
    help="file that gets the table of the claims, if it has the same markers (default: README.md; of tables of your "
    "own, none)",
)  # fmt: skip
@options.data("with --runs: folder of their data (default: the one that each run names)", required=False)
def command(runs, folder, page, readme, data):
    """Tables and figures of the experiment on TUPE's claims, from the compressed tables of its runs.

    tupe claims --runs evidence

    Of runs on other text: --evidence names a folder of your own for tables, page and figures.
    """
    ours = folder == EVIDENCE
    page = page or (Path("docs/results.md") if ours else folder / "results.md")
    readme = readme or (Path("README.md") if ours else None)
    for output in runs:
        known = collect.read(folder)
        merged = collect.merge(known, collect.collect(output.resolve(), known, data))
        Evidence(merged)  # refuses what does not belong together, before it is written
        collect.write(merged, folder)
    evidence = Evidence(collect.read(folder))
    drawn = draw(evidence, page.parent / "figures")
    for stage, text in PAGES.items():
        if evidence.trials(stage):
            write_atomically(folder / f"{stage}.md", text(evidence))
    if not page.exists():
        write_atomically(page, f"# Results\n\n{BEGIN}\n{END}\n")
    fill_in(page, results(evidence, drawn, "figures", os.path.relpath(folder, page.parent)))
    if readme and readme.exists() and BEGIN in readme.read_text(encoding="utf-8"):
        fill_in(readme, claims_tables.summary(evidence))
    size = sum(path.stat().st_size for path in folder.glob("*.csv.gz"))
    click.echo(f"{page}: {len(evidence.runs)} runs, {len(drawn)} figures; {folder}: {size / 1e6:.2f} MB")
