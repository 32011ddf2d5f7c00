"""One page, Markdown and CSV of collected fine-tuning runs."""

import base64
import csv
import html
import io
import statistics
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from ..plugin.glue import TASKS
from .results import (
    EPOCHS,
    PAPER_COLUMNS,
    average,
    configuration_table,
    correlations,
    lost,
    metric_table,
    paper_row,
    paper_tables,
    pretraining_table,
    property_table,
    summarise,
)

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
        _legend(figure, len(models))
        return _svg(figure)


def pretraining_curves(summaries):
    """{what it shows: SVG}: score against pre-training updates, of models with several checkpoints (Figure 5 b, c)."""
    lines = defaultdict(dict)
    for model, tasks in summaries.items():
        lines[model.name][model.updates] = {column: value[0] for column, value in paper_row(tasks).items()}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    every = [set(point) for points in lines.values() for point in points.values()]
    shared = [column for column in PAPER_COLUMNS if every and all(column in names for names in every)]
    panels = {"MNLI-m": ["MNLI-m"]} if "MNLI-m" in shared else {}
    if shared:
        panels[f"mean of {len(shared)} columns"] = shared
    pictures = {}
    for label, columns in panels.items():
        with _figure() as (figure, axes):
            for index, (name, points) in enumerate(sorted(lines.items())):
                xs = sorted(points)
                axes.plot(xs, [average(points[x], columns) for x in xs], marker="o", label=name, **_style(index))
            axes.set(xlabel="pre-training updates", ylabel=label)
            _legend(figure, len(lines))
            pictures[f"{label} against pre-training updates"] = _svg(figure)
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


def _legend(figure, count):
    """Below the axes, where it hides no curve."""
    figure.set_figheight(figure.get_figheight() + 0.17 * count)  # inches, of a line
    figure.legend(loc="outside lower center", fontsize=8)


def _svg(figure):
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()


# -------------------------------------------------------------------------------------------------------------- pages

PROTOCOL = (
    "Scores on the development sets, times 100. A configuration is a learning rate; its score is the median over "
    "seeds, and the configuration with the best median is shown, among those with the most finished seeds. The average "
    "is the mean of the paper's nine columns, MNLI-m and -mm separate; WNLI is outside of it."
)
WHICH_EPOCH = (
    "The paper does not say which epoch its scores are from; its released command evaluates during each epoch and "
    "keeps the best. Runs here are evaluated once after each epoch."
)
PRETRAINED = "The pre-trained models"
PROPERTIES = "Properties of the position encodings"
CORRELATIONS = (
    "Pearson correlation, over the models with position encodings, of each property with each score (mean over seeds, "
    "best epoch):"
)


def write_report(found, output, properties=None, pretrained=None):
    """Write index.html (self-contained), report.md with its pictures and runs.csv into `output`; returns the path of
    the page.

    properties: {model: {measure: value}}, shown with their correlations with the scores. pretrained: {model: (loss,
    unigram entropy)}, shown with a verdict.
    """
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    summaries = {epoch: summarise(found.runs, epoch) for epoch in EPOCHS}
    (output / "runs.csv").write_text(_csv(found), encoding="utf-8")
    pictures = {"Score against pre-training": pretraining_curves(summaries["best"])}
    tasks = dict.fromkeys(key[1] for key in sorted(found.runs))
    pictures["Learning curves"] = {f"learning curves of {task}": learning_curves(found.runs, task) for task in tasks}
    for name, svg in (item for group in pictures.values() for item in group.items()):
        (output / file_name(name)).write_text(svg, encoding="utf-8")
    for name, page in (("report.md", _markdown), ("index.html", _html)):
        (output / name).write_text(page(found, summaries, properties, pretrained, pictures), encoding="utf-8")
    return output / "index.html"


def file_name(picture):
    return picture.replace(" ", "_") + ".svg"


def _csv(found):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = [
        "architecture",
        "variant",
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
                        model.variant,
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


def _markdown(found, summaries, properties, pretrained, pictures):
    lines = ["# Fine-tuning report", "", f"{_counts(found)}. {PROTOCOL}", ""]
    if pretrained:
        lines += [f"## {PRETRAINED}", "", *_markdown_table(*pretraining_table(pretrained))]
    for epoch, what in EPOCHS.items():
        for title, source, header, rows in paper_tables(summaries[epoch], lost(found)):
            lines += [f"## {title}, {what}", "", f"Published rows: {source}. {WHICH_EPOCH}", ""]
            lines += _markdown_table(header, rows)
        header, rows = metric_table(summaries[epoch], lost(found))
        lines += [
            f"## All scores, {what}",
            "",
            "Mean ± standard deviation over the seeds of the best configuration.",
            "",
        ]
        lines += _markdown_table(header, rows)
    if properties:
        lines += [f"## {PROPERTIES}", "", *_markdown_table(*property_table(properties))]
        if len(properties) > 2:
            lines += [CORRELATIONS, "", *_markdown_table(*correlations(properties, summaries["best"]))]
    for title, group in pictures.items():
        if group:
            lines += [f"## {title}", "", *(f"![{name}]({file_name(name)})" for name in group), ""]
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
thead th { border-bottom: 2px solid #555; white-space: normal; min-width: 3.5rem; vertical-align: bottom; }
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


def _html(found, summaries, properties, pretrained, pictures):
    e = html.escape
    body = [f"<h1>Fine-tuning report</h1><p>{e(_counts(found))}.</p><p>{e(PROTOCOL)}</p>"]
    if pretrained:
        body.append(f"<h2>{PRETRAINED}</h2>{_html_table(*pretraining_table(pretrained))}")
    for epoch, what in EPOCHS.items():
        section = []
        for title, source, header, rows in paper_tables(summaries[epoch], lost(found)):
            section.append(f"<h2>{e(title)}: {e(what)}</h2>{_html_table(header, rows)}")
            section.append(f"<p>Published rows: {e(source)}. {e(WHICH_EPOCH)}</p>")
        header, rows = metric_table(summaries[epoch], lost(found))
        section.append(f"<h2>All scores: {e(what)}</h2>{_html_table(header, rows)}")
        section.append("<p>Mean ± standard deviation over the seeds of the best configuration.</p>")
        text = "".join(section)
        body.append(
            text if epoch == "best" else f"<details><summary>The same at the {e(what)}</summary>{text}</details>"
        )
    if properties:
        body.append(f"<h2>{PROPERTIES}</h2>{_html_table(*property_table(properties))}")
        if len(properties) > 2:
            body.append(f"<p>{CORRELATIONS}</p>{_html_table(*correlations(properties, summaries['best']))}")
    body.append("<h2>Every configuration</h2>")
    tried = defaultdict(dict)  # with the tasks of which every run failed
    for model, task, *_ in sorted([*found.runs, *found.broken]):
        tried[model][task] = True
    for model, tasks in tried.items():
        inner = "".join(
            f"<h3>{e(task)} {e(TASKS[task].metrics[0] if task in TASKS else '')}</h3>"
            + _html_table(*configuration_table(model, task, found.runs, found.broken))
            for task in tasks
        )
        body.append(f"<details><summary>{e(str(model))}</summary>{inner}</details>")
    for title, group in pictures.items():
        if group:
            told = "<p>Thin: every run. Thick: median of a model.</p>" if title == "Learning curves" else ""
            images = "".join(_image(svg, name) for name, svg in group.items())
            body.append(f'<h2>{title}</h2>{told}<div class="figures">{images}</div>')
    for title, entries in _problems(found):
        items = "".join(f"<li><code>{e(str(folder))}</code>: {e(reason)}</li>" for folder, reason in entries)
        body.append(f"<h2>{title} ({len(entries)})</h2><ul>{items}</ul>")
    every = sorted([*found.runs.items(), *found.broken.items()], key=lambda item: item[0])
    body.append(f"<h2>Runs</h2><details><summary>Commands, versions and commits of {len(every)} runs</summary><ul>")
    for _, result in every:
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
    head = "".join(f"<th scope='col'>{e(cell).replace('-', '&#8209;')}</th>" for cell in header)  # no break in MNLI-m
    lines = (
        f'<tr class="{kind}">' + "".join(f"<td>{e(cell)}</td>" for cell in cells) + "</tr>" for kind, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _image(svg, text):
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}">'
