"""Tables of collected fine-tuning runs beside the published numbers: `tupe report`."""

import statistics
from pathlib import Path

import click

from ..common import options
from ..common.tables import TextTable
from ..run.folder import write_atomically
from .collection import Collection, collect, with_unit
from .scores import COLUMNS, PAPER_COLUMNS, Uncertainty, is_in, paper_row, published, summarise

PROTOCOL = (
    "Scores on the development sets, times 100, at the best epoch of each run. A configuration is a learning rate; its "
    "score is the median over seeds, and the configuration with the best median is shown, among those with the most "
    "finished seeds; runs.csv has every run. Where a run's length or another setting is not that of most runs "
    "of its task, the model's name says it: only runs with the same settings share a row."
)
PUBLISHED = (
    "The average is the mean over the paper's nine columns, MNLI-m and -mm separate and without WNLI, or over those of "
    "them that all models here have. The paper does not say which epoch its scores are from; its released command "
    "evaluates during each epoch and keeps the best."
)
ERRORS = (
    "Mean ± standard deviation over the seeds of the best configuration. Then standard errors of the mean by their "
    "source: the seeds of fine-tuning, the seeds of pre-training; in brackets their number, ? where one cannot tell. "
    "Seeds of pre-training are those of checkpoints whose records, beside them, agree in all other settings; copies of "
    "one count once. Which examples are in the development set is in none of them, nor the choice of the epoch and of "
    "the learning rate on the same examples."
)
DIFFERENCES = (
    "From the plain BERT-A (ELECTRA-A) of the same size, after as many updates and fine-tuned with the same settings. "
    "Of several it is one that was pre-trained alike, by its record, and with the same seed, where there is one. "
    "Differences are paired by the seeds of fine-tuning, then, between the means of all pre-trainings, by theirs."
)


def paper_tables(summaries: dict) -> list:
    """[(title, source, table)]: the paper's tables with our rows."""
    tables = []
    for table in published()["tables"]:
        ours = {model: paper_row(tasks) for model, tasks in summaries.items() if is_in(table, model)}
        ours = {model: row for model, row in ours.items() if row}
        if ours:
            tables.append((table["title"], table["source"], _paper_table(table, ours)))
    return tables


def _paper_table(table, ours):
    columns = [c for c in COLUMNS if c in PAPER_COLUMNS or any(c in row for row in ours.values())]
    shared = [c for c in PAPER_COLUMNS if all(c in row for row in ours.values())]
    rows = []

    def add(kind, name, values):
        """values: {column: number}"""
        mean = [f"{statistics.mean(values[c] for c in shared):.2f}"] if shared else []
        rows.append((kind, [name, *(f"{values[c]:.2f}" if c in values else "" for c in columns), *mean]))

    for entry in table["rows"]:
        name = f"{entry['name']} ({with_unit(entry['updates'])})"
        add("", name, dict(zip(PAPER_COLUMNS, entry["scores"], strict=True)))
    for model, row in ours.items():
        add("ours", str(model), row)
    average = ["average" if shared == PAPER_COLUMNS else f"average of {len(shared)}"] if shared else []
    return TextTable(["model", *columns, *average], rows)


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


def counts(collection: Collection) -> str:
    others = [f"{len(entries)} {title}" for title, entries in collection.of_no_score.items()]
    return ", ".join([f"{len(collection.finished)} finished runs", *others])


def sections(collection: Collection) -> list:
    """[(title, texts and tables)] of the report."""
    summaries, report = summarise(collection.finished), []
    for title, source, table in paper_tables(summaries):
        report.append((title, [f"Published rows: {source}. {PUBLISHED}", table]))
    uncertainty = Uncertainty(summaries)
    report.append(("All scores", [ERRORS, uncertainty.score_table()]))
    report.append(("Differences", [DIFFERENCES, uncertainty.difference_table()]))
    report = [(title, blocks) for title, blocks in report if blocks[-1].rows]
    for title, entries in collection.of_no_score.items():
        if entries:
            lines = "\n".join(f"- `{folder}`: {reason}" for folder, reason in entries)
            report.append((f"{title.capitalize()} ({len(entries)})", [lines]))
    return report


def write_report(collection: Collection, output: str | Path) -> Path:
    """Write report.md and runs.csv into the folder `output`; returns the path of report.md."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    texts = ["# Fine-tuning report", f"{counts(collection)}.", PROTOCOL]
    for title, blocks in sections(collection):
        texts += [f"## {title}", *(block if isinstance(block, str) else block.markdown().strip() for block in blocks)]
    write_atomically(output / "runs.csv", run_table(collection).csv())
    write_atomically(output / "report.md", "\n\n".join(texts) + "\n")
    click.echo(f"report: {counts(collection)}; {output / 'report.md'}")
    return output / "report.md"


@click.command(cls=options.QuietCommand)
@click.argument("runs", nargs=-1, required=True, type=options.FOLDER, metavar="FOLDER ...")
@options.output("The folder to write: report.md and runs.csv.")
def command(runs, output):
    """Fine-tuning runs beside the published numbers, in one Markdown page. FOLDER: of a run, of a sweep, or of several;
    all that is in it is looked through."""
    write_report(collect(runs), output)
