"""How uncertain fine-tuning scores are, and from what: which examples are in the development set (bootstrap), the seeds
of fine-tuning, the seeds of pre-training. Differences between models are paired: the same examples, the same seeds."""

import json
import statistics
from collections import defaultdict

import numpy as np

from ..plugin import squad
from ..plugin.glue import METRICS, TASKS
from ..tables import Table
from .results import Collection, Model, Run
from .statistics import mean_interval
from .summary import Summary, score_name

RESAMPLES = 200
REFERENCES = ("bert_a", "bert_r")  # architectures that others are compared with: the first of these that is there


def values_of(run: Run, split: str, epoch: str) -> list[tuple] | None:
    """(prediction, target) of every example of a development set, in a fixed order; None if they were not kept.

    Of SQuAD: (exact match, F1) of every question. epoch: "best" or "last".
    """
    folder, task = run.folder / "predictions", run.record.task
    if task in TASKS:
        path, labels = folder / f"{split}_{epoch}.tsv", TASKS[task].labels
        if not path.exists():
            return None
        read = labels.index if labels else float
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        return [(read(prediction), read(target)) for _, prediction, target in rows]
    path, golds = folder / f"{split}_{epoch}.json", folder / f"{split}_golds.json"
    if not (path.exists() and golds.exists()):
        return None
    answers, golds = (json.loads(file.read_text(encoding="utf-8")) for file in (path, golds))
    version, measures = task.removeprefix("SQuAD-"), (squad.exact_match, squad.f1)
    return [
        tuple(squad.best_over_golds(measure, answers[question], golds[question], version) for measure in measures)
        for question in sorted(golds)
    ]


def score_of(task: str, metric: str, values: np.ndarray) -> float:
    """The score, times 100, of `values_of` as an array [examples, 2]."""
    if task in TASKS:
        return 100 * float(METRICS[metric](values[:, 1], values[:, 0]))
    return 100 * float(values[:, {"exact": 0, "f1": 1}[metric]].mean())


def example_scores(runs: dict[int, Run], split: str, metric: str, epoch: str) -> dict[int, np.ndarray] | None:
    """{seed: [RESAMPLES] scores of development sets whose examples are drawn anew}, the same draws for all runs of a
    task; None if predictions of a run were not kept."""
    values = {seed: values_of(run, split, epoch) for seed, run in runs.items()}
    if not values or None in values.values():
        return None
    scores = {}
    for seed, pairs in values.items():
        pairs, rng = np.array(pairs), np.random.default_rng(1)
        drawn = [pairs[rng.integers(len(pairs), size=len(pairs))] for _ in range(RESAMPLES)]
        scores[seed] = np.array([score_of(runs[seed].record.task, metric, values) for values in drawn])
    return scores


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def uncertainty_tables(collection: Collection, summaries: dict[Model, dict[str, Summary]], epoch: str) -> list[Table]:
    """[scores with standard errors, differences from the reference] of the first metric of every task and split."""
    rows, compared, reference = [], [], reference_of(summaries)
    repeats = defaultdict(list)  # models that differ in the run of pre-training alone
    for model in summaries:
        repeats[model.architecture, model.variant, model.updates].append(model)
    cells, draws = {}, {}  # {model: {column: {seed: score}}}, and the same with example_scores
    for model, tasks in summaries.items():
        cells[model], draws[model] = {}, {}
        for task, summary in tasks.items():
            runs = {seed: collection.finished[model, task, summary.lr, seed] for seed in summary.by_lr[summary.lr]}
            metric = next(iter(runs.values())).record.metrics[0]
            for split in next(iter(runs.values())).record.splits:
                column = task, split, metric
                cells[model][column] = {seed: run.score(split, metric, epoch) for seed, run in runs.items()}
                draws[model][column] = example_scores(runs, split, metric, epoch)
    for model, columns in cells.items():
        group = repeats[model.architecture, model.variant, model.updates]
        for column, by_seed in columns.items():
            examples = draws[model][column]
            error = None if examples is None else float(np.mean(list(examples.values()), axis=0).std(ddof=1))
            means = [statistics.mean(cells[other][column].values()) for other in group if column in cells[other]]
            spread = standard_error(means)
            rows.append([
                str(model), score_name(column), f"{statistics.mean(by_seed.values()):.2f}", shown(error),
                f"{shown(standard_error(list(by_seed.values())))} ({len(by_seed)})",
                f"{shown(spread)} ({len(means)})",
            ])  # fmt: skip
            if reference is None or model == reference or column not in cells[reference]:
                continue
            theirs = cells[reference][column]
            seeds = sorted(set(by_seed) & set(theirs))
            if not seeds:
                continue
            mean, interval = mean_interval([by_seed[seed] - theirs[seed] for seed in seeds])
            other, error = draws[reference][column], None
            if examples is not None and other is not None:
                error = float(np.mean([examples[seed] - other[seed] for seed in seeds], axis=0).std(ddof=1))
            bounds = "?" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"
            compared.append([str(model), score_name(column), f"{mean:+.2f}", shown(error), f"{bounds} ({len(seeds)})"])
    header = ["model", "score", "mean", "development examples", "fine-tuning seeds", "pre-training seeds"]
    tables = [Table.plain(header, rows, align="llrrrr")]
    if compared:
        header = [f"minus {reference}", "score", "mean", "development examples", "95 % over fine-tuning seeds"]
        tables.append(Table.plain(header, compared, align="llrrr"))
    return tables


def reference_of(summaries: dict[Model, dict[str, Summary]]) -> Model | None:
    """The model that others are compared with; None for fewer than two models."""
    models = sorted(summaries)
    for name in REFERENCES:
        for model in models:
            if model.architecture.rpartition("_")[0] == name or model.architecture == name:
                return model if len(models) > 1 and not model.variant else None
    return models[0] if len(models) > 1 else None


def shown(error: float | None) -> str:
    return "?" if error is None else f"{error:.2f}"
