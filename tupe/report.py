"""From folders of fine-tuning runs to the paper's tables: collecting, summarising, and one page that shows it all."""

import base64
import csv
import html
import io
import json
import statistics
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .finetune import is_finished, read_result
from .glue import TASKS
from .sweep import read_failure, read_sweep, state_of

PUBLISHED = Path(__file__).with_name("published.json")
# Column of the paper's tables -> (task, split, score). WNLI stands outside of the paper's tables and averages.
COLUMNS = {
    "MNLI-m": ("MNLI", "valid", "accuracy"),
    "MNLI-mm": ("MNLI", "valid1", "accuracy"),
    **{
        name: (name, "valid", TASKS[name].metrics[0])
        for name in ("QNLI", "QQP", "SST-2", "CoLA", "MRPC", "RTE", "STS-B")
    },
    "WNLI": ("WNLI", "valid", "accuracy"),
}
PAPER_COLUMNS = [name for name in COLUMNS if name != "WNLI"]
EPOCHS = {"best": "best epoch of each run", "last": "last epoch of each run"}


# --------------------------------------------------------------------------------------------------------- collecting


@dataclass
class Collection:
    """What was found: finished runs {(model, task, lr, seed): result}, and everything else with its reason."""

    runs: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)  # (folder, reason)
    missing: list = field(default_factory=list)  # (folder, "not started" or "running")
    left_out: list = field(default_factory=list)  # (folder, reason)


@dataclass(frozen=True, order=True)
class Model:
    """A pre-trained model: what the runs of one table row share."""

    architecture: str
    updates: int  # of pre-training
    checkpoint: str

    def __str__(self):
        return f"{self.architecture} @ {steps(self.updates)}"


def steps(updates):
    """1000000 -> "1M", 300000 -> "300k", 2450 -> "2450"."""
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if updates >= unit and updates % unit == 0:
            return f"{updates // unit}{name}"
    return str(updates)


def collect(folders):
    """Look through folders, and all that is in them, for runs. Raises ValueError if there is no run at all."""
    found, runs, sweeps = Collection(), {}, {}  # dicts as ordered sets: a folder may be named twice
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        files = sorted(path for name in ("scores.json", "failed.json", "sweep.json") for path in folder.rglob(name))
        for path in files:
            (sweeps if path.name == "sweep.json" else runs)[path.parent.resolve()] = path.parent
    for path in runs.values():
        _add_run(found, path)
    for path in sweeps.values():
        _add_missing(found, path)
    if not found.runs and not found.failed:
        raise ValueError(f"no finished or failed run in {', '.join(map(str, folders))}")
    return found


def _add_run(found, path):
    try:
        result, failure = read_result(path), read_failure(path)
        if not is_finished(result):
            if failure:
                found.failed.append((path, failure["reason"]))
            else:
                found.left_out.append((path, "not finished"))
            return
        key = (
            Model(result["architecture"], result["pretrained_updates"], result["pretrained"]),
            result["task"], float(result["lr"]), int(result["seed"]),
        )  # fmt: skip
        for record in result["records"]:
            for name in result["metrics"]:
                float(record[name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found.left_out.append((path, f"not a run of this project ({type(error).__name__}: {error})"))
        return
    result["folder"] = str(path)
    if key in found.runs:
        same = found.runs[key]["records"] == result["records"]
        other = found.runs[key]["folder"]
        found.left_out.append((path, f"duplicate of {other}, {'same' if same else 'OTHER'} scores"))
    else:
        found.runs[key] = result


def _add_missing(found, folder):
    try:
        _, jobs = read_sweep(folder)
    except (KeyError, ValueError, TypeError) as error:
        found.left_out.append((folder, f"unreadable sweep.json ({error})"))
        return
    for job in jobs:
        state = state_of(job)
        if state in ("open", "running"):
            found.missing.append((job.folder, "running" if state == "running" else "not run yet"))


# -------------------------------------------------------------------------------------------------------- summarising


def scores(result, split, metric, epoch):
    """The score of one run at its best or last epoch."""
    records = [record for record in result["records"] if record["split"] == split]
    if epoch == "best":
        records = [record for record in records if record["best"]]
    return records[-1][metric]


@dataclass
class Summary:
    """One task of one model: scores of every seed by learning rate, and the paper's choice among them."""

    by_lr: dict  # lr -> {seed: {(split, metric): score}}
    lr: float  # of the best configuration: the highest median over seeds of the first metric (mean over dev sets)

    def values(self, split, metric, lr=None):
        return [values[split, metric] for values in self.by_lr[lr or self.lr].values()]

    def median(self, split, metric, lr=None):
        return statistics.median(self.values(split, metric, lr))


def summarise(runs, epoch):
    """{model: {task: Summary}}"""
    grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    keys = {}
    for (model, task, lr, seed), result in sorted(runs.items(), key=lambda item: item[0]):
        pairs = [(split, metric) for split in result["splits"] for metric in result["metrics"]]
        grouped[model][task][lr][seed] = {pair: scores(result, *pair, epoch) for pair in pairs}
        keys[task] = [(split, result["metrics"][0]) for split in result["splits"]]
    summaries = defaultdict(dict)
    for model, tasks in grouped.items():
        for task, by_lr in tasks.items():
            summary = Summary(dict(by_lr), min(by_lr))
            summary.lr = max(by_lr, key=lambda lr: statistics.mean(summary.median(*pair, lr) for pair in keys[task]))
            summaries[model][task] = summary
    return dict(summaries)


def paper_row(tasks):
    """{column: (median of the best configuration, scores of its seeds)} of the columns a model has."""
    row = {}
    for column, (task, split, metric) in COLUMNS.items():
        if task in tasks:
            row[column] = tasks[task].median(split, metric), tasks[task].values(split, metric)
    return row


def average(values, columns=PAPER_COLUMNS):
    """The paper's average: the mean over its nine columns, MNLI-m and -mm separate; None if one is missing."""
    return statistics.mean(values[column] for column in columns) if all(c in values for c in columns) else None


def published():
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


SIZES = ("large", "small", "mini", "tiny")


def split_size(architecture):
    """("tupe_r", "mini") of "tupe_r_mini"; no suffix is "base"."""
    name, _, size = architecture.rpartition("_")
    return (name, size) if size in SIZES else (architecture, "base")


def counterpart(table, model):
    """The published row to compare a model with, or None: the same architecture and size at the nearest number of
    updates; for the sizes that no paper has, the fully trained base row."""
    name, size = split_size(model.architecture)
    wanted = "base" if size in ("small", "mini", "tiny") else size
    rows = [row for row in table["rows"] if split_size(row["architecture"]) == (name, wanted)]
    if size != wanted:
        return max(rows, key=lambda row: row["updates"], default=None)
    return min(rows, key=lambda row: abs(row["updates"] - model.updates), default=None)


# ------------------------------------------------------------------------------------------------------------ tables


def paper_tables(summaries):
    """The paper's tables with our rows: [(title, source, header, [(kind of row, cells)])]."""
    tables = []
    for table in published()["tables"]:
        ours = {model: paper_row(tasks) for model, tasks in summaries.items() if counterpart(table, model)}
        ours = {model: row for model, row in ours.items() if row}
        if not ours:
            continue
        columns = [
            column for column in COLUMNS if column in PAPER_COLUMNS or any(column in row for row in ours.values())
        ]
        shared = [column for column in PAPER_COLUMNS if all(column in row for row in ours.values())]
        partly = 0 < len(shared) < len(PAPER_COLUMNS)
        header = ["model", *columns, "average"] + [f"mean of {' '.join(shared)}"] * partly
        rows = []
        for entry in table["rows"]:
            values = dict(zip(PAPER_COLUMNS, entry["scores"], strict=True))
            cells = [f"{values[column]:.2f}" if column in values else "" for column in columns]
            more = [f"{average(values, shared):.2f}"] * partly
            rows.append(
                [
                    "published",
                    [f"{entry['name']} ({steps(entry['updates'])})", *cells, f"{entry['average']:.2f}", *more],
                ]
            )
        for model, row in ours.items():
            entry, middle = counterpart(table, model), {column: value[0] for column, value in row.items()}
            theirs = dict(zip(PAPER_COLUMNS, entry["scores"], strict=True))
            means = [average(middle)] + [average(middle, shared)] * partly
            their_means = [entry["average"]] + [average(theirs, shared)] * partly
            cells = [f"{row[c][0]:.2f}" if c in row else "" for c in columns]
            rows.append(["ours", [str(model), *cells, *(number(mean) for mean in means)]])
            spread = [f"± {deviation(row[c][1])} ({len(row[c][1])})" if c in row else "" for c in columns]
            rows.append(["spread", ["standard deviation (seeds)", *spread, *[""] * len(means)]])
            cells = [f"{middle[c] - theirs[c]:+.2f}" if c in row and c in theirs else "" for c in columns]
            gaps = [f"{a - b:+.2f}" if a is not None else "" for a, b in zip(means, their_means, strict=True)]
            size, other = split_size(model.architecture)[1], split_size(entry["architecture"])[1]
            note = "" if size == other else f", {other} size"
            rows.append(["difference", [f"minus {entry['name']} ({steps(entry['updates'])}{note})", *cells, *gaps]])
        tables.append((table["title"], table["source"], header, rows))
    return tables


def number(value):
    return "" if value is None else f"{value:.2f}"


def deviation(values):
    return f"{statistics.stdev(values):.2f}" if len(values) > 1 else "?"


def metric_table(summaries):
    """Every score of the best configuration, mean and standard deviation over seeds: header, rows."""
    columns = sorted({(task, *pair) for tasks in summaries.values() for task, s in tasks.items() for pair in _pairs(s)})
    columns.sort(key=lambda c: (list(TASKS).index(c[0]) if c[0] in TASKS else len(TASKS), c[0], c[1]))
    rows = []
    for model, tasks in summaries.items():
        cells = []
        for task, split, metric in columns:
            values = tasks[task].values(split, metric) if task in tasks else []
            cells.append(f"{statistics.mean(values):.2f} ± {deviation(values)}" if values else "")
        rows.append(["ours", [str(model), *cells]])
    names = {"valid": "", "valid1": " (mm)"}
    return ["model", *(f"{task}{names[split]} {metric}" for task, split, metric in columns)], rows


def _pairs(summary):
    return next(iter(next(iter(summary.by_lr.values())).values()))


def configuration_table(model, task, runs):
    """Every learning rate and seed of a task: header, rows with the first metric at the best and the last epoch."""
    mine = {(lr, seed): result for (m, t, lr, seed), result in runs.items() if (m, t) == (model, task)}
    seeds = sorted({seed for _, seed in mine})
    rows = []
    for lr in sorted({lr for lr, _ in mine}):
        for epoch in EPOCHS:
            values = {}
            for seed in seeds:
                if (lr, seed) in mine:
                    result = mine[lr, seed]
                    pairs = [(split, result["metrics"][0]) for split in result["splits"]]
                    values[seed] = statistics.mean(scores(result, *pair, epoch) for pair in pairs)
            cells = [f"{values[seed]:.2f}" if seed in values else "" for seed in seeds]
            summary = [f"{statistics.median(values.values()):.2f}", deviation(list(values.values()))]
            rows.append([epoch, [f"{lr:g}", epoch, *cells, *summary]])
    return ["lr", "epoch", *(f"seed {seed}" for seed in seeds), "median", "deviation"], rows


# ----------------------------------------------------------------------------------------------------------- pictures

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")


def learning_curves(runs, task):
    """SVG: first metric against epoch, a thin line per run and a thick one for the median of each model."""
    with _figure() as (figure, axes):
        models = sorted({model for model, t, _, _ in runs if t == task})
        for index, model in enumerate(models):
            curves = []
            for (m, t, _, _), result in runs.items():
                if (m, t) == (model, task):
                    records = [r for r in result["records"] if r["split"] == result["splits"][0]]
                    curves.append([record[result["metrics"][0]] for record in records])
                    metric = result["metrics"][0]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, linewidth=0.5, alpha=0.4, **_style(index))
            middle = [statistics.median(c[e] for c in curves if e < len(c)) for e in range(max(map(len, curves)))]
            axes.plot(range(1, len(middle) + 1), middle, linewidth=2.5, label=str(model), **_style(index))
        axes.set(xlabel="epoch", ylabel=f"{task} {metric}")
        axes.legend(fontsize=8)
        return _svg(figure)


def pretraining_curves(summaries):
    """[SVG]: score against pre-training updates, of architectures with several checkpoints (Figure 5 b, c)."""
    lines = defaultdict(dict)
    for model, tasks in summaries.items():
        lines[model.architecture][model.updates] = {column: value[0] for column, value in paper_row(tasks).items()}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    every = [set(point) for points in lines.values() for point in points.values()]
    shared = [column for column in PAPER_COLUMNS if every and all(column in names for names in every)]
    panels = {"MNLI-m": ["MNLI-m"]} if "MNLI-m" in shared else {}
    if shared:
        panels[f"mean of {len(shared)} columns"] = shared
    pictures = []
    for label, columns in panels.items():
        with _figure() as (figure, axes):
            for index, (name, points) in enumerate(sorted(lines.items())):
                xs = sorted(points)
                axes.plot(xs, [average(points[x], columns) for x in xs], marker="o", label=name, **_style(index))
            axes.set(xlabel="pre-training updates", ylabel=label)
            axes.legend(fontsize=8)
            pictures.append(_svg(figure))
    return pictures


def _style(index):
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


@contextmanager
def _figure():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.6), constrained_layout=True)
    axes.spines[["top", "right"]].set_visible(False)
    yield figure, axes
    plt.close(figure)


def _svg(figure):
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()


# -------------------------------------------------------------------------------------------------------------- pages

PROTOCOL = (
    "Scores on the development sets, times 100. A configuration is a learning rate; its score is the median over "
    "seeds, and the configuration with the best median is shown. The average is the mean of the paper's nine columns, "
    "MNLI-m and -mm separate; WNLI is outside of it."
)
WHICH_EPOCH = (
    "The paper does not say which epoch its scores are from; its released command evaluates during each epoch and "
    "keeps the best. Runs here are evaluated once after each epoch."
)


def write_report(found, output):
    """Write index.html (self-contained), report.md and runs.csv into `output`; returns the path of the page."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    summaries = {epoch: summarise(found.runs, epoch) for epoch in EPOCHS}
    (output / "runs.csv").write_text(_csv(found), encoding="utf-8")
    (output / "report.md").write_text(_markdown(found, summaries), encoding="utf-8")
    (output / "index.html").write_text(_html(found, summaries), encoding="utf-8")
    return output / "index.html"


def _csv(found):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = [
        "architecture",
        "pretraining updates",
        "task",
        "split",
        "lr",
        "seed",
        "epoch",
        "updates",
        "best",
        "metric",
        "score",
    ]
    writer.writerow([*header, "folder"])
    for (model, task, lr, seed), result in sorted(found.runs.items(), key=lambda item: item[0]):
        for record in result["records"]:
            for metric in result["metrics"]:
                writer.writerow(
                    [
                        model.architecture,
                        model.updates,
                        task,
                        record["split"],
                        f"{lr:g}",
                        seed,
                        record["epoch"],
                        record["num_updates"],
                        int(record["best"]),
                        metric,
                        repr(record[metric]),
                        result["folder"],
                    ]  # fmt: skip
                )
    return out.getvalue()


def _counts(found):
    text = f"{len(found.runs)} finished runs, {len(found.failed)} failed, {len(found.missing)} missing"
    return text + (f", {len(found.left_out)} left out" if found.left_out else "")


def _problems(found):
    """Sections of what is not in the tables: (title, [(folder, reason)])."""
    sections = (("Failed", found.failed), ("Missing", found.missing), ("Left out", found.left_out))
    return [(title, entries) for title, entries in sections if entries]


def _markdown(found, summaries):
    lines = ["# Fine-tuning report", "", f"{_counts(found)}. {PROTOCOL}", ""]
    for epoch, what in EPOCHS.items():
        for title, source, header, rows in paper_tables(summaries[epoch]):
            lines += [f"## {title}, {what}", "", f"Published rows: {source}. {WHICH_EPOCH}", ""]
            lines += _markdown_table(header, rows)
        header, rows = metric_table(summaries[epoch])
        lines += [
            f"## All scores, {what}",
            "",
            "Mean ± standard deviation over the seeds of the best configuration.",
            "",
        ]
        lines += _markdown_table(header, rows)
    for title, entries in _problems(found):
        lines += [f"## {title}", "", *(f"- `{folder}`: {reason}" for folder, reason in entries), ""]
    return "\n".join(lines)


def _markdown_table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for kind, cells in rows:
        marked = [f"**{cell}**" if kind == "ours" and cell else cell for cell in cells]
        lines.append("| " + " | ".join(marked) + " |")
    return [*lines, ""]


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p { max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 2px solid #555; }
tr.ours td { font-weight: 600; border-bottom: none; padding-top: .6rem; }
tr.spread td, tr.last td { color: #595959; } tr.spread td { border-bottom: none; }
tr.difference td { font-style: italic; }
details { margin: .5rem 0; } summary { cursor: pointer; }
code { font-size: .8rem; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
.figures img { width: 100%; height: auto; }
@media (max-width: 40rem) { th, td { padding: .2rem .4rem; }
  td:first-child, th:first-child { white-space: normal; min-width: 7rem; } }
"""


def _html(found, summaries):
    e = html.escape
    body = [f"<h1>Fine-tuning report</h1><p>{e(_counts(found))}.</p><p>{e(PROTOCOL)}</p>"]
    for epoch, what in EPOCHS.items():
        section = []
        for title, source, header, rows in paper_tables(summaries[epoch]):
            section.append(f"<h2>{e(title)}: {e(what)}</h2>{_html_table(header, rows)}")
            section.append(f"<p>Published rows: {e(source)}. {e(WHICH_EPOCH)}</p>")
        header, rows = metric_table(summaries[epoch])
        section.append(f"<h2>All scores: {e(what)}</h2>{_html_table(header, rows)}")
        section.append("<p>Mean ± standard deviation over the seeds of the best configuration.</p>")
        text = "".join(section)
        body.append(
            text if epoch == "best" else f"<details><summary>The same at the {e(what)}</summary>{text}</details>"
        )
    pictures = pretraining_curves(summaries["best"])
    if pictures:
        images = "".join(_image(picture, "score against pre-training updates") for picture in pictures)
        body.append(f'<h2>Score against pre-training</h2><div class="figures">{images}</div>')
    body.append("<h2>Every configuration</h2>")
    for model, tasks in summaries["best"].items():
        inner = "".join(
            f"<h3>{e(task)} {e(TASKS[task].metrics[0] if task in TASKS else '')}</h3>"
            + _html_table(*configuration_table(model, task, found.runs))
            for task in tasks
        )
        body.append(f"<details><summary>{e(str(model))}</summary>{inner}</details>")
    body.append('<h2>Learning curves</h2><p>Thin: every run. Thick: median of a model.</p><div class="figures">')
    for task in dict.fromkeys(key[1] for key in sorted(found.runs)):
        body.append(_image(learning_curves(found.runs, task), f"learning curves of {task}"))
    body.append("</div>")
    for title, entries in _problems(found):
        items = "".join(f"<li><code>{e(str(folder))}</code>: {e(reason)}</li>" for folder, reason in entries)
        body.append(f"<h2>{title} ({len(entries)})</h2><ul>{items}</ul>")
    body.append(
        f"<h2>Runs</h2><details><summary>Commands, versions and commits of {len(found.runs)} runs</summary><ul>"
    )
    for _, result in sorted(found.runs.items(), key=lambda item: item[0]):
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        facts = f"commit {result['commit']}; {versions}; {result['device']}; {result['finished_at']}"
        body.append(f"<li>{e(result['folder'])}<br><code>{e(' '.join(result['command']))}</code><br>{e(facts)}</li>")
    body.append("</ul></details>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Fine-tuning report</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>\n'
    )


def _html_table(header, rows):
    e = html.escape
    head = "".join(f"<th scope='col'>{e(cell)}</th>" for cell in header)
    lines = (
        f'<tr class="{kind}">' + "".join(f"<td>{e(cell)}</td>" for cell in cells) + "</tr>" for kind, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _image(svg, text):
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}">'
