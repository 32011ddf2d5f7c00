"""Tables and curves of collected fine-tuning runs beside the published numbers: `tupe report`."""

import statistics
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from matplotlib.ticker import MaxNLocator

from ..common import options, plotting
from ..common.architectures import split_size
from ..common.record import write_atomically
from ..common.tables import TextTable
from ..data.glue import TASKS
from .runs import EPOCHS, Collection, Model, collect, with_unit
from .summary import (
    COLUMNS,
    PAPER_COLUMNS,
    average,
    correlations,
    counterpart,
    majority,
    mean_columns,
    mean_name,
    paper_row,
    pretraining,
    properties,
    published,
    score_columns,
    score_lists,
    score_name,
    summarise,
)
from .uncertainty import uncertainty_tables

# ------------------------------------------------------------------------------------------------------------- tables

NO_BETTER = "†"  # behind a score that is no better than always giving one answer
LEARNED = 1.0  # nats below the unigram entropy from which on a model counts as pre-trained


def paper_tables(summaries: dict, all_failed: Container[tuple] = (), baselines: dict | None = None) -> list:
    """[(title, source, table)]: the paper's tables with our rows.

    all_failed: {(model, task)} of which no run came to its end. baselines: what `majority` returns.
    """
    tables = []
    for table in published()["tables"]:
        ours = {model: paper_row(tasks) for model, tasks in summaries.items() if counterpart(table, model)}
        ours = {model: row for model, row in ours.items() if row}
        if ours:
            content = _paper_table(table, ours, summaries, all_failed, baselines or {})
            tables.append((table["title"], table["source"], content))
    return tables


def _paper_table(table, ours, summaries, all_failed, baselines):
    columns = [c for c in COLUMNS if c in PAPER_COLUMNS or any(c in row for row in ours.values())]
    shared = [c for c in PAPER_COLUMNS if all(c in row for row in ours.values())]
    means = [PAPER_COLUMNS]  # columns of each average
    if 1 < len(shared) < len(PAPER_COLUMNS):
        means.append(shared)
    rows = []

    def add(kind, name, cells, averages=None):
        rows.append((kind, [name, *(cells.get(c, "") for c in columns), *(averages or [""] * len(means))]))

    for entry in table["rows"]:
        theirs = dict(zip(PAPER_COLUMNS, entry["scores"], strict=True))
        averages = [entry["average"], *(average(theirs, mean) for mean in means[1:])]
        add("published", published_name(entry), {c: number(theirs[c]) for c in theirs}, [number(a) for a in averages])
    single = {c: baselines[COLUMNS[c]] for c in columns if COLUMNS[c] in baselines}
    if single:
        cells = {c: number(value) for c, value in single.items()}
        add("majority", "majority", cells, [number(average(single, mean)) for mean in means])
    for model, row in ours.items():
        medians = {c: median for c, (median, _) in row.items()}
        averages = [average(medians, mean) for mean in means]
        cells = {c: "failed" for c in columns if (model, COLUMNS[c][0]) in all_failed}
        cells.update({c: marked(medians[c], single.get(c)) for c in row})
        add("ours", str(model), cells, [number(a) for a in averages])
        spread = {c: f"± {deviation(values)} ({len(values)})" for c, (_, values) in row.items()}
        add("detail", "standard deviation (seeds)", spread)
        add("detail", "learning rate chosen", {c: f"{summaries[model][COLUMNS[c][0]].lr:g}" for c in row})
        entry = counterpart(table, model)
        theirs = dict(zip(PAPER_COLUMNS, entry["scores"], strict=True))
        their_averages = [entry["average"], *(average(theirs, mean) for mean in means[1:])]
        gaps = {c: f"{medians[c] - theirs[c]:+.2f}" for c in row if c in theirs}
        pairs = zip(averages, their_averages, strict=True)
        size, other = split_size(model.architecture)[1], split_size(entry["architecture"])[1]
        note = "" if size == other else f", {other} size"
        name = f"minus {published_name(entry, note)}"
        add("difference", name, gaps, [f"{a - b:+.2f}" if a is not None else "" for a, b in pairs])
    return TextTable(["model", *columns, "average", *(f"mean of {' '.join(mean)}" for mean in means[1:])], rows)


def published_name(entry: dict, note: str = "") -> str:
    """ "TUPE-R (1M)" of a published row."""
    return f"{entry['name']} ({with_unit(entry['updates'])}{note})"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def marked(value: float, baseline: float | None, spread: str = "") -> str:
    """A score and its spread, marked where the score is no better than the baseline (None: not known)."""
    is_better = baseline is None or value > baseline + 1e-9
    return f"{number(value)}{spread}{'' if is_better else NO_BETTER}"


def deviation(values: Sequence[float]) -> str:
    return number(statistics.stdev(values)) if len(values) > 1 else "?"


def metric_table(summaries: dict, all_failed: Container[tuple] = (), baselines: dict | None = None) -> TextTable:
    """Every score of the best configurations, mean and standard deviation over seeds. See `paper_tables`."""
    shared, columns, baselines = mean_columns(summaries), score_columns(summaries), baselines or {}
    names = [score_name(column) for column in columns]
    if shared:
        names.insert(0, mean_name(shared))
    single = {score_name(column): baselines[column] for column in columns if column in baselines}
    if shared and all(column in baselines for column in shared):
        single[mean_name(shared)] = statistics.mean(baselines[column] for column in shared)
    rows = [("majority", ["majority", *(number(single.get(name)) for name in names)])] if single else []
    for model, lists in score_lists(summaries).items():
        cells = {score_name(column): "failed" for column in columns if (model, column[0]) in all_failed}
        for name, values in lists.items():
            if values:
                mean = statistics.mean(values)
                cells[name] = marked(mean, single.get(name), f" ± {deviation(values)}")
        rows.append(("ours", [str(model), *(cells.get(name, "") for name in names)]))
        tasks = summaries[model]
        rates = {score_name(column): f"{tasks[column[0]].lr:g}" for column in columns if column[0] in tasks}
        rows.append(("detail", ["learning rate chosen", *(rates.get(name, "") for name in names)]))
    return TextTable(["model", *names], rows)


def configuration_table(model: Model, task: str, collection: Collection) -> TextTable:
    """Every learning rate and seed of a task: the first metric (mean over development sets) at the best and the last
    epoch."""
    finished = {key[2:]: run for key, run in collection.finished.items() if key[:2] == (model, task)}
    broken = {key[2:] for key in collection.broken if key[:2] == (model, task)}
    seeds = sorted({seed for _, seed in {*finished, *broken}})
    rows = []
    for lr in sorted({lr for lr, _ in {*finished, *broken}}):
        for epoch in EPOCHS:
            values = {}
            for seed in seeds:
                if (lr, seed) in finished:
                    run = finished[lr, seed]
                    metric = run.record.metrics[0]
                    values[seed] = statistics.mean(run.score(split, metric, epoch) for split in run.record.splits)
            gaps = {seed: "failed" for seed in seeds if (lr, seed) in broken}
            cells = [number(values[seed]) if seed in values else gaps.get(seed, "") for seed in seeds]
            median = [number(statistics.median(values.values())), deviation([*values.values()])] if values else ["", ""]
            rows.append((epoch, [f"{lr:g}", epoch, *cells, *median]))
    title = f"{task} {TASKS[task].metrics[0]}" if task in TASKS else task
    header = ["lr", "epoch", *(f"seed {seed}" for seed in seeds), "median", "deviation"]
    return TextTable(header, rows, title=title)


def pretraining_table(losses: dict) -> TextTable:
    """losses: see `pretraining`."""
    rows = []
    for model, (loss, entropy) in losses.items():
        verdict = "yes" if entropy - loss >= LEARNED else "FAILED"
        rows.append(("ours", [str(model), f"{loss:.3f}", f"{entropy:.3f}", f"{verdict}, {entropy - loss:.2f}"]))
    header = ["model", "MLM loss, validation (nats)", "unigram entropy (nats)", f"at least {LEARNED:g} nat below"]
    return TextTable(header, rows)


def property_table(probed: dict) -> TextTable:
    """probed: see `properties`."""
    names = list(next(iter(probed.values())))
    rows = [("ours", [str(model), *(f"{row[name]:.4g}" for name in names)]) for model, row in probed.items()]
    return TextTable(["model", *names], rows)


def correlation_table(probed: dict, summaries: dict) -> TextTable:
    """probed, summaries: see `correlations`."""
    rows = [
        [measure, *("" if value is None else f"{value:+.2f}" for value in row.values())]
        for measure, row in correlations(probed, summaries).items()
    ]
    return TextTable.plain(["property", *next(iter(score_lists(summaries).values()))], rows)


def run_table(collection: Collection) -> TextTable:
    """Every score of every finished run, unrounded, for runs.csv."""
    header = [
        "architecture", "variant", "settings", "pretraining updates", "task", "split", "lr", "seed", "epoch", "updates",
        "best", "metric", "score", "folder",
    ]  # fmt: skip
    rows = []
    for (model, task, lr, seed), run in sorted(collection.finished.items(), key=lambda item: item[0]):
        for entry in run.record.scores:
            for metric in run.record.metrics:
                cells = [
                    model.architecture, model.variant, model.settings, model.updates, task, entry["split"], f"{lr:g}",
                    seed, entry["epoch"], entry["num_updates"], int(entry["best"]), metric, entry[metric], run.folder,
                ]  # fmt: skip
                rows.append([str(cell) for cell in cells])
    return TextTable.plain(header, rows)


# ----------------------------------------------------------------------------------------------------------- pictures


@dataclass
class Picture:
    name: str  # what it shows
    png: bytes

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_") + ".png"


def learning_curves(collection: Collection, summaries: dict, task: str, baselines: dict) -> Picture:
    """First metric against epoch: of every model, the median over the seeds of its chosen learning rate."""
    runs = {key: run for key, run in collection.finished.items() if key[1] == task}
    split, metric = next((run.record.splits[0], run.record.metrics[0]) for run in runs.values())
    figure, (axis,) = plotting.curves()
    for index, model in enumerate(sorted({model for model, *_ in runs})):
        lr, by_epoch = summaries[model][task].lr, defaultdict(list)
        for key, run in runs.items():
            if key[:3] == (model, task, lr):
                for entry in run.entries(split):
                    by_epoch[entry["epoch"]].append(entry[metric])
        medians = [statistics.median(by_epoch[epoch]) for epoch in sorted(by_epoch)]
        axis.plot(sorted(by_epoch), medians, label=f"{model}, lr {lr:g}", **plotting.style(index))
    if (task, split, metric) in baselines:
        axis.axhline(baselines[task, split, metric], color="0.5", linewidth=0.8, label="majority")
    axis.set(xlabel="epoch", ylabel=score_name((task, split, metric)))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    plotting.legend(figure)
    return Picture(f"learning curves of {task}", plotting.png(figure))


def pretraining_curves(summaries: dict) -> list:
    """Pictures: score against pre-training updates, of models with several checkpoints (the paper's figure 5 b, c)."""
    lines = defaultdict(dict)
    for model, tasks in summaries.items():
        lines[model.name][model.updates] = {column: median for column, (median, _) in paper_row(tasks).items()}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    rows = [row for points in lines.values() for row in points.values()]
    shared = [column for column in PAPER_COLUMNS if rows and all(column in row for row in rows)]
    panels = {"MNLI-m": ["MNLI-m"]} if "MNLI-m" in shared else {}
    if shared:
        panels[f"mean of {len(shared)} columns"] = shared
    pictures = []
    for label, columns in panels.items():
        figure, (axis,) = plotting.curves()
        for index, (name, points) in enumerate(sorted(lines.items())):
            updates = sorted(points)
            axis.plot(updates, [average(points[u], columns) for u in updates], label=name, **plotting.style(index))
        axis.set(xlabel="pre-training updates", ylabel=label)
        plotting.legend(figure)
        pictures.append(Picture(f"{label} against pre-training updates", plotting.png(figure)))
    return pictures


# ------------------------------------------------------------------------------------------------------------ sections

PROTOCOL = (
    "Scores on the development sets, times 100. A configuration is a learning rate; its score is the median over "
    "seeds, and the configuration with the best median is shown, among those with the most finished seeds. The average "
    "is the mean of the paper's nine columns, MNLI-m and -mm separate; WNLI is outside of it. Where runs of a task "
    "differ in length or other settings, the models' names say them: only runs with the same settings share a row."
)
WHICH_EPOCH = (
    "The paper does not say which epoch its scores are from; its released command evaluates during each epoch and "
    "keeps the best. Runs here are evaluated once after each epoch."
)
MAJORITY = f"{NO_BETTER}: no better than the row majority, which is always giving one answer (a correlation of 0)."
SPREAD = (
    "Mean ± standard deviation over the seeds of the best configuration. The mean over tasks is that of Wang et al. "
    "(2021): a column per task, MNLI's the matched set."
)
UNCERTAINTY = (
    "Standard errors of the mean over seeds (best configuration, best epoch), by their source: which examples are in "
    "the development set (bootstrap, the same draws for all models), the seeds of fine-tuning, the seeds of "
    "pre-training; in brackets their number, ? where one cannot tell. Seeds of pre-training are those of checkpoints "
    "whose records, beside them, agree in all other settings; copies of one count once. Differences are from the plain "
    "BERT-A (ELECTRA-A) of the same size, pre-training updates and settings, paired by example and by seed. Choosing "
    "the epoch and the learning rate on the same examples is in none of them."
)
CORRELATIONS = (
    "Pearson correlation, over the models with position encodings, of each property with each score (mean over seeds, "
    "best epoch):"
)


@dataclass
class Section:
    """blocks: texts, tables, Pictures, Entries and Sections."""

    title: str
    blocks: list


@dataclass
class Entries:
    """A list of (folder, lines about it)."""

    entries: list


def sections(collection: Collection, probed: dict | None = None, losses: dict | None = None) -> list:
    """The sections of the report. probed: see `properties`; losses: see `pretraining`."""
    summaries = {epoch: summarise(collection.finished, epoch) for epoch in EPOCHS}
    baselines, best = majority(collection.finished), summaries["best"]
    report = []
    if losses:
        report.append(Section("The pre-trained models", [pretraining_table(losses)]))
    for epoch, label in EPOCHS.items():
        scores = score_sections(summaries[epoch], label, collection.all_failed(), baselines)
        report += scores if epoch == "best" else [Section(f"The same at the {label}", scores)]
    if probed:
        blocks = [property_table(probed)]
        if len(probed) > 2:
            blocks += [CORRELATIONS, correlation_table(probed, best)]
        report.append(Section("Properties of the position encodings", blocks))
    if best:
        report.append(Section("Uncertainty", [UNCERTAINTY, *uncertainty_tables(collection, best, "best")]))
    report.append(Section("Score against pre-training", pretraining_curves(best)))
    tasks = dict.fromkeys(key[1] for key in sorted(collection.finished))
    curves = [learning_curves(collection, best, task, baselines) for task in tasks]
    text = "Medians over the seeds of each model's best configuration."
    report.append(Section("Learning curves", [text, *curves] if curves else []))
    cut = shortened_table(collection)
    report.append(Section("Inputs that were cut", [cut] if cut.rows else []))
    for title in ("Failed", "Missing", "Left out"):
        entries = [(folder, [reason]) for folder, reason in getattr(collection, title.lower().replace(" ", "_"))]
        report.append(Section(f"{title} ({len(entries)})", [Entries(entries)] if entries else []))
    tried = defaultdict(dict)  # {model: its tasks}, those too of which every run failed
    for model, task, *_ in sorted([*collection.finished, *collection.broken]):
        tried[model][task] = configuration_table(model, task, collection)
    models = [Section(str(model), [*tables.values()]) for model, tables in tried.items()]
    report.append(Section("Every configuration", models))
    return [section for section in report if section.blocks]


def score_sections(summaries: dict, label: str, all_failed: Container[tuple], baselines: dict) -> list:
    """The paper's tables and all scores, of one of EPOCHS."""
    legend = [MAJORITY] if baselines else []
    tables = [
        Section(f"{title}: {label}", [f"Published rows: {source}. {WHICH_EPOCH}", *legend, table])
        for title, source, table in paper_tables(summaries, all_failed, baselines)
    ]
    return [*tables, Section(f"All scores: {label}", [SPREAD, *legend, metric_table(summaries, all_failed, baselines)])]


def shortened_table(collection: Collection) -> TextTable:
    """How many inputs were cut to the models' length."""
    runs = {(str(model), task): run for (model, task, *_), run in sorted(collection.finished.items())}
    rows = [
        [model, task, split, str(count)]
        for (model, task), run in runs.items()
        for split, count in run.record.shortened.items()
    ]
    return TextTable.plain(["model", "task", "split", "inputs that were cut to the model's length"], rows, align="lllr")


def counts(collection: Collection) -> str:
    numbers = [f"{len(collection.finished)} finished runs", f"{len(collection.failed)} failed"]
    numbers.append(f"{len(collection.missing)} missing")
    if collection.left_out:
        numbers.append(f"{len(collection.left_out)} left out")
    return ", ".join(numbers)


# ------------------------------------------------------------------------------------------------------------- writing


def markdown(report: list, level: int = 2) -> str:
    """The sections as Markdown that names the files of its pictures."""
    lines = []
    for section in report:
        lines += [f"{'#' * level} {section.title}", ""]
        for block in section.blocks:
            match block:
                case str():
                    lines += [block, ""]
                case TextTable():
                    lines += [block.markdown()]
                case Picture():
                    lines += [f"![{block.name}]({block.file_name})", ""]
                case Entries():
                    lines += [*(f"- `{folder}`: {'; '.join(texts)}" for folder, texts in block.entries), ""]
                case Section():
                    lines += [markdown([block], level + 1)]
    return "\n".join(lines)


def write_report(
    collection: Collection, output: str | Path, probed: dict | None = None, losses: dict | None = None
) -> Path:
    """Write report.md with its pictures, and runs.csv, into the folder `output`; returns the path of report.md.

    probed: what `properties` returns, shown with their correlations with the scores. losses: what `pretraining`
    returns, shown with a verdict.
    """
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    report, introduction = sections(collection, probed, losses), [f"{counts(collection)}.", PROTOCOL]
    for section in report:
        for block in section.blocks:
            if isinstance(block, Picture):
                write_atomically(output / block.file_name, block.png)
    write_atomically(output / "runs.csv", run_table(collection).csv())
    text = "\n\n".join(["# Fine-tuning report", *introduction, markdown(report)])
    write_atomically(output / "report.md", text)
    return output / "report.md"


@click.command(cls=options.QuietCommand)
@click.argument("runs", nargs=-1, required=True, type=options.FOLDER, metavar="FOLDER ...")
@options.output("The folder to write: report.md with its pictures, and runs.csv.")
@click.option("--properties", "with_properties", is_flag=True, help="Probe the pre-trained checkpoints too.")
@click.option("--pretraining", "with_losses", is_flag=True, help="Show masked-LM losses beside the unigram entropy.")
@options.data("The pre-training data, for these two (default: the checkpoint's own).", required=False)
def command(runs, output, with_properties, with_losses, data):
    """Fine-tuning runs beside the published numbers, in one Markdown page. FOLDER: of a run, of a sweep, or of several;
    all that is in it is looked through."""
    collection = collect(runs)
    models = collection.models()
    probed = properties(models, data) if with_properties else None
    losses = pretraining(models, data) if with_losses else None
    path = write_report(collection, output, probed, losses)
    click.echo(f"report: {counts(collection)}; {path}")
