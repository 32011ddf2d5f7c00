"""Scores of collected runs: medians over seeds and the learning rate that wins, the paper's average, and what they
stand beside: published scores, and the best constant answer."""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..common.architectures import split_size
from ..data.glue import TASKS, score
from .collection import Model

PUBLISHED = Path(__file__).with_name("published.json")
# Column of the paper's tables -> (task, split, metric). WNLI stands outside of the paper's tables and averages.
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


@dataclass
class Summary:
    """One task of one model: scores of every seed by learning rate, and the paper's choice among them."""

    by_lr: dict  # lr -> {seed: {(split, metric): score}}
    # Of the best configuration: the highest median over seeds of the first metric (mean over dev sets), among those
    # with the most seeds: what is left of a configuration whose other runs failed is no match for a whole one.
    lr: float

    def values(self, split: str, metric: str, lr: float | None = None) -> list:
        """Scores of the seeds, at the chosen learning rate unless another is given."""
        return [values[split, metric] for values in self.by_lr[lr or self.lr].values()]

    def median(self, split: str, metric: str, lr: float | None = None) -> float:
        return statistics.median(self.values(split, metric, lr))

    def pairs(self) -> list:
        """Every (split, metric) that was scored."""
        return list(next(iter(self.by_lr[self.lr].values())))


def summarise(runs: dict) -> dict:
    """{model: {task: Summary}} of finished runs {key: FinishedRun}."""
    grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    firsts = {}
    for (model, task, lr, seed), run in sorted(runs.items(), key=lambda item: item[0]):
        pairs = [(split, metric) for split in run.record.splits for metric in run.record.metrics]
        grouped[model][task][lr][seed] = {pair: run.score(*pair) for pair in pairs}
        firsts[task] = [(split, run.record.metrics[0]) for split in run.record.splits]
    summaries = defaultdict(dict)
    for model, tasks in grouped.items():
        for task, by_lr in tasks.items():
            summary = Summary(dict(by_lr), min(by_lr))
            most = max(map(len, by_lr.values()))
            whole = [lr for lr in by_lr if len(by_lr[lr]) == most]
            summary.lr = max(whole, key=lambda lr: statistics.mean(summary.median(*pair, lr) for pair in firsts[task]))
            summaries[model][task] = summary
    return dict(summaries)


def paper_row(tasks: dict) -> dict:
    """{column: median of the best configuration} of the columns that a model has."""
    row = {}
    for column, (task, split, metric) in COLUMNS.items():
        if task in tasks and (split, metric) in tasks[task].pairs():
            row[column] = tasks[task].median(split, metric)
    return row


def score_columns(summaries: dict) -> list:
    """All (task, split, metric) that some model has, in the order of the tables."""
    tasks = [item for tasks in summaries.values() for item in tasks.items()]
    columns = {(task, *pair) for task, summary in tasks for pair in summary.pairs()}
    return sorted(columns, key=lambda c: (list(TASKS).index(c[0]) if c[0] in TASKS else len(TASKS), c))


def score_name(column: tuple) -> str:
    task, split, metric = column
    return f"{task}{' (mm)' if split == 'valid1' else ''} {metric}"


# ------------------------------------------------------------------------------------------------------ to compare with


def majority(runs: dict) -> dict:
    """{(task, split, metric): score} of always giving the same answer, the best one for the metric; 0 for correlations.

    Computed from the targets beside the runs' predictions.
    """
    baselines = {}
    for run in runs.values():
        task, metrics = run.record.task, run.record.metrics
        for split in run.record.splits:
            if (task, split, metrics[0]) not in baselines and (known := run.predictions(split)) is not None:
                found = constant_scores(task, known[:, 1])
                baselines.update({(task, split, metric): value for metric, value in found.items()})
    return baselines


def constant_scores(task: str, targets: np.ndarray) -> dict:
    """{metric: score} of the best constant answer to a task of GLUE. targets: classes, or scores."""
    glue = TASKS[task]
    answers = set(targets) if glue.labels else {0.0}
    tried = [score(glue.metrics, [answer] * len(targets), targets) for answer in answers]
    return {metric: max(scores[metric] for scores in tried) for metric in glue.metrics}


def published() -> dict:
    """The tables of the paper, see published.json."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def is_in(table: dict, model: Model) -> bool:
    """Whether a table of the paper has the architecture of a model, in its size; the tables of base also show the sizes
    that no paper has. Variants of an architecture are in none."""
    name, size = split_size(model.architecture)
    wanted = "base" if size in ("small", "mini", "tiny") else size
    return not model.variant and any(split_size(row["architecture"]) == (name, wanted) for row in table["rows"])
