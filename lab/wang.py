"""The published tables of Wang et al. (ICLR 2021) beside our models of the same encodings.

They continue from a trained BERT-Base with the encoding exchanged; scores are means over runs.
"""

import functools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import yaml
from scipy.stats import pearsonr

from tupe.common import options
from tupe.common.architectures import ARCHITECTURES, split_size
from tupe.common.tables import TextTable
from tupe.evaluate.loading import load_model
from tupe.positions import parse
from tupe.sweep.collection import Model, collect
from tupe.sweep.compare import command as compare
from tupe.sweep.scores import COLUMNS, Summary, score_columns, score_name, summarise

from .properties import identical_word_attention, measures

SCORES = {  # our name of a score -> the column of their tables
    "CoLA matthews": "CoLA", "SST-2 accuracy": "SST-2", "MNLI accuracy": "MNLI", "MRPC f1": "MRPC F1",
    "QNLI accuracy": "QNLI", "QQP f1": "QQP F1", "RTE accuracy": "RTE", "STS-B spearman": "STS-B Spearman",
    "WNLI accuracy": "WNLI", "SQuAD-1.1 f1": "v1.1 F1", "SQuAD-1.1 exact": "v1.1 EM", "SQuAD-2.0 f1": "v2.0 F1",
    "SQuAD-2.0 exact": "v2.0 EM",
}  # fmt: skip
MEASURES = {  # our measure of identical-word probing -> theirs; the formulas are not the same
    "monotonicity violation": "monotonicity, all offsets",
    "monotonicity violation, first 20 offsets": "monotonicity, first 20 offsets",
    "translation violation": "translation invariance, without [CLS] and [SEP]",
    "translation violation with [CLS], [SEP]": "translation invariance, with [CLS] and [SEP]",
    "symmetry violation": "symmetry",
    "direction balance": "direction balance",
}
METRICS = {"MRPC": "f1", "QQP": "f1", "STS-B": "spearman"}  # of their mean over GLUE; elsewhere TUPE's
ENCODINGS = yaml.safe_load(Path(__file__).with_name("wang.yaml").read_text(encoding="utf-8"))
BETTER = "‡"
EXPLANATION = (
    "Published rows: {source}. They are of size base and go on from a trained BERT, so only the order of the rows can "
    f"be compared with ours. {BETTER}: marked by the authors as significantly better than their learned absolute "
    "positions (`ape`). Their marks are of SQuAD alone, and of better, not worse; they are what a Welch t-test of the "
    "published means and deviations over five runs says at 5 %, but for three cells with p between 0.04 and 0.07. The "
    "mean over GLUE is theirs on both sides, of eight columns: one for MNLI, of which ours is the matched set, F1 for "
    "MRPC and QQP, Spearman for STS-B, no WNLI."
)


@functools.cache
def published() -> dict:
    """The content of wang.json."""
    return json.loads(Path(__file__).with_name("wang.json").read_text(encoding="utf-8"))


def schemes_in(position: str) -> tuple[str, ...]:
    """Names of the schemes of a position, without their options."""
    return tuple(part.name for part in parse(position))


@functools.cache
def rows() -> dict[tuple[str, ...], str]:
    """{schemes: row of the published tables} of `ENCODINGS`."""
    return {schemes_in(position): row for row, position in ENCODINGS.items()}


def counterpart(model: Model) -> str | None:
    """The published row of a model's encoding in BERT; None if there is none, or the model differs in more."""
    name, _ = split_size(model.architecture)
    position, cls = ARCHITECTURES.get(name, ("", ""))
    # `python -m lab continue --next-sentence` adds segments, as theirs have them
    differs = [part for part in model.variant.split(", ") if part not in ("", "segments learned")]
    if len(differs) == 1 and differs[0].startswith("position "):
        position = differs[0].removeprefix("position ")
    elif differs:
        return None
    return rows().get(schemes_in(position)) if cls == "tied" and position else None


def published_score(row: str, column: str) -> str:
    """A cell of their tables: "89.65 ± 0.11 ‡"."""
    if column in published()["glue"][row]:
        return f"{published()['glue'][row][column]:.1f}"
    entry = published()["squad"][row][column]
    return f"{entry['mean']:.2f} ± {entry['std']:.2f}" + f" {BETTER}" * entry["significant"]


def mean_columns(summaries: dict) -> list:
    """(task, split, metric) of their mean over GLUE, as far as every model has them: a column per task, MNLI's the
    matched one, F1 for MRPC and QQP, Spearman for STS-B, no WNLI. [] where it would be the mean of one."""
    columns = [(task, split, METRICS.get(task, metric)) for task, split, metric in COLUMNS.values()]
    columns = [(task, split, metric) for task, split, metric in columns if task != "WNLI" and split == "valid"]
    shared = [column for column in columns if all(column[0] in tasks for tasks in summaries.values())]
    return shared if len(shared) > 1 else []


def glue_mean(tasks: dict[str, Summary], columns: Sequence) -> list:
    """Mean over columns, for each seed that all of them have. columns: (task, split, metric), see `mean_columns`."""
    by_seed = {task: tasks[task].by_lr[tasks[task].lr] for task, *_ in columns}
    seeds = sorted(set.intersection(*map(set, by_seed.values())))
    return [statistics.mean(by_seed[task][seed][split, metric] for task, split, metric in columns) for seed in seeds]


def score_lists(summaries: dict) -> dict:
    """{model: {name: scores of the seeds}} of the best configurations, the mean over GLUE first; [] where a model has
    none."""
    shared, columns = mean_columns(summaries), score_columns(summaries)
    lists = {}
    for model, tasks in summaries.items():
        name = f"mean of {len(shared)} (F1, Spearman; no WNLI)"
        lists[model] = {name: glue_mean(tasks, shared)} if shared else {}
        for task, *pair in columns:
            lists[model][score_name((task, *pair))] = tasks[task].values(*pair) if task in tasks else []
    return lists


def properties(models: Iterable[Model], data: str | Path | None = None) -> dict:
    """{model: {measure: value}}: identical-word probing of each model's pre-trained checkpoint."""
    loaded = ((model, *load_model(model.checkpoint, data)) for model in models)
    return {model: measures(identical_word_attention(net, text.symbols)) for model, net, text in loaded}


def correlations(probed: dict, summaries: dict) -> dict:
    """{measure: {name of a score: Pearson correlation over models}}, scores as means over seeds; None for fewer than
    three models, or where one side is constant. Over models with position encodings only, as theirs.

    probed: see `properties`.
    """
    lists = score_lists(summaries)
    models = [model for model in lists if model in probed and "position nopos" not in model.variant]
    return {
        measure: {
            name: _pearson([
                (probed[model][measure], statistics.mean(lists[model][name]))
                for model in models
                if lists[model][name] and math.isfinite(probed[model][measure])
            ])
            for name in next(iter(lists.values()))
        }
        for measure in next(iter(probed.values()))
    }  # fmt: skip


def _pearson(pairs):
    varied = len(pairs) > 2 and all(len(set(side)) > 1 for side in zip(*pairs, strict=True))
    return float(pearsonr(*zip(*pairs, strict=True))[0]) if varied else None


def correlation_table(probed: dict, summaries: dict) -> TextTable:
    rows = [
        [measure, *("" if value is None else f"{value:+.2f}" for value in row.values())]
        for measure, row in correlations(probed, summaries).items()
    ]
    return TextTable.plain(["correlation with", *next(iter(score_lists(summaries).values()))], rows)


def score_table(summaries: dict[Model, dict[str, Summary]]) -> TextTable | None:
    """A published row above each of our models that has one, in the scores that we have; None if there is none."""
    rows, lists = [], score_lists(summaries)
    models = {model: row for model in lists if (row := counterpart(model))}
    names = [name for name in SCORES if any(lists[model].get(name) for model in models)]
    if not names:
        return None
    whole = len(mean_columns(summaries)) == 8  # theirs is of eight, no fewer
    for model, row in models.items():
        theirs = [published_score(row, SCORES[name]) for name in names]
        ours = [f"{statistics.mean(lists[model][name]):.2f}" if lists[model].get(name) else "" for name in names]
        rows.append(("", [f"{row} (published)", *theirs, *([str(published()["glue"][row]["mean"])] * whole)]))
        means = next(iter(lists[model].values()))  # by seed: none, if the tasks have no seed in common
        mean = [f"{statistics.mean(means):.2f}" if means else ""] * whole
        rows.append(("ours", [str(model), *ours, *mean]))
    return TextTable(["model", *(SCORES[name] for name in names), *(["mean"] * whole)], rows)


def property_table(probed: dict[Model, dict[str, float]]) -> TextTable | None:
    """The same for the measures of identical-word probing; None without a model that has a published row."""
    rows, names = [], [name for name in MEASURES if all(name in values for values in probed.values())]
    for model, values in probed.items():
        if row := counterpart(model):
            theirs = published()["properties"][row]
            rows.append(("", [f"{row} (published)", *(f"{theirs[MEASURES[name]]:.4g}" for name in names)]))
            rows.append(("ours", [str(model), *(f"{values[name]:.4g}" for name in names)]))
    return TextTable(["model", *(MEASURES[name] for name in names)], rows) if rows and names else None


@click.command("wang", cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@click.argument("options_of_compare", nargs=-1, type=click.UNPROCESSED, metavar="OPTIONS OF `tupe compare`")
def grid(options_of_compare):
    """Pre-train the thirteen encodings alike, by `tupe compare`.

    python -m lab wang --data DATA --output OUT --max-update 6000
    """
    positions = [f"--position={position}" for position in ENCODINGS.values()]
    compare.main([*positions, *options_of_compare], "python -m lab wang")


@click.command("wang-tables", cls=options.QuietCommand)
@click.argument("runs", nargs=-1, required=True, type=options.FOLDER, metavar="FOLDER ...")
@click.option("--properties", "with_properties", is_flag=True, help="Probe the pre-trained checkpoints too, and "
              "correlate the measures with the scores.")  # fmt: skip
@options.data("The pre-training data, for --properties (default: the checkpoint's own).", required=False)
def tables(runs, with_properties, data):
    """Print the published tables beside our fine-tuned models of the same encodings, as Markdown."""
    collection = collect(runs)
    summaries = summarise(collection.finished)
    probed = properties(summaries, data) if with_properties else {}
    found = [score_table(summaries), property_table(probed) if probed else None]
    if not any(found):
        raise ValueError(f"no model in {', '.join(map(str, runs))} has one of the thirteen encodings (lab/wang.yaml)")
    if len(probed) > 2:
        found.append(correlation_table(probed, summaries))
    texts = [EXPLANATION.format(source=published()["source"]) + "\n", *(table.markdown() for table in found if table)]
    click.echo("\n".join(texts))
