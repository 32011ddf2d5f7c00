"""Scores of collected runs: medians over seeds and the learning rate that wins, the published ones, and how uncertain
they are, from what: the seeds of fine-tuning, the seeds of pre-training."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from ..common.architectures import ELECTRA, split_size, with_size
from ..common.tables import TextTable
from ..data.glue import TASKS
from .collection import Model, pretraining_record, settings_of, settings_text

Seeds = dict[int, float]
FEWEST = 3  # seeds; an interval from two says more about the t-distribution than about the models
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
        firsts[model, task] = [(split, run.record.metrics[0]) for split in run.record.splits]
    summaries = defaultdict(dict)
    for model, tasks in grouped.items():
        for task, by_lr in tasks.items():
            summary = Summary(dict(by_lr), min(by_lr))
            most = max(map(len, by_lr.values()))
            whole = [lr for lr in by_lr if len(by_lr[lr]) == most]
            pairs = firsts[model, task]
            summary.lr = max(whole, key=lambda lr: statistics.mean(summary.median(*pair, lr) for pair in pairs))
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


def published() -> dict:
    """The tables of the paper, see published.json."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def is_in(table: dict, model: Model) -> bool:
    """Whether a table of the paper has the architecture of a model, in its size; the tables of base also show the sizes
    that no paper has. Variants of an architecture are in none."""
    name, size = split_size(model.architecture)
    wanted = "base" if size in ("small", "mini", "tiny") else size
    return not model.variant and any(split_size(row["architecture"]) == (name, wanted) for row in table["rows"])


# ----------------------------------------------------------------------------------------------- how uncertain they are


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


class Uncertainty:
    """Of the scores of each model's best configurations."""

    def __init__(self, summaries: dict[Model, dict[str, Summary]]):
        self.summaries, self.columns = summaries, score_columns(summaries)
        self.scores = defaultdict(dict)  # {(model, column): {seed: score}}
        for model, tasks in summaries.items():
            for task, summary in tasks.items():
                for seed, scores in summary.by_lr[summary.lr].items():
                    for pair, score in scores.items():
                        self.scores[model, (task, *pair)][seed] = score
        self.pretrainings = {model: pretraining_of(model) for model in summaries}
        self.repeats = defaultdict(list)  # {what repetitions of a pre-training share: [(seed, model)]}
        for model, of in self.pretrainings.items():
            self.repeats[of.shared].append((of.seed, model))

    def means(self, model: Model, column: tuple) -> Seeds:
        """{seed of the pre-training: mean over seeds of fine-tuning}; copies of one checkpoint are one."""
        group = self.repeats[self.pretrainings[model].shared]
        return {
            seed: statistics.mean(self.scores[one, column].values())
            for seed, one in group
            if (one, column) in self.scores
        }

    def score_table(self) -> TextTable:
        """Every score with its standard errors."""
        rows = []
        for column in self.columns:
            for model, tasks in self.summaries.items():
                if (model, column) in self.scores:
                    values, means = [*self.scores[model, column].values()], [*self.means(model, column).values()]
                    mean = statistics.mean(values)
                    deviation = shown(statistics.stdev(values) if len(values) > 1 else None)
                    rows.append([
                        str(model), score_name(column), f"{tasks[column[0]].lr:g}",
                        f"{mean:.2f} ± {deviation}",
                        f"{shown(standard_error(values))} ({len(values)})",
                        f"{shown(standard_error(means))} ({len(means)})",
                    ])  # fmt: skip
        header = ["model", "score", "learning rate", "mean ± deviation"]
        header += ["error by fine-tuning seeds", "error by pre-training seeds"]
        return TextTable.plain(header, rows, align="llrrrr")

    def difference_table(self) -> TextTable:
        """Differences from each model's reference, trained with the same settings and the same seed of pre-training
        where there is such a one; then those of the means over pre-trainings. Without rows if no model has one."""
        rows = []
        for model, column in itertools.product(self.summaries, self.columns):
            found = references_of(model, self.summaries)
            if not found or model in found:  # BERT-A itself
                continue
            reference = min(found, key=lambda one: self.pretrainings[one].unlike(self.pretrainings[model]))
            ours, theirs = self.scores.get((model, column), {}), self.scores.get((reference, column), {})
            if not set(ours) & set(theirs):
                continue
            means = self.means(model, column), self.means(reference, column)
            cells = [
                "{:+.2f}: {}".format(*interval_of(a, b)) if a.keys() & b.keys() else "?"
                for a, b in ((ours, theirs), means)
            ]
            rows.append([str(model), str(reference), score_name(column), *cells])
        header = ["model", "minus", "score", "mean: 95 % over fine-tuning seeds", "mean: 95 % over pre-training seeds"]
        return TextTable.plain(header, rows, align="lllrr")


def mean_interval(values: list[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, its 95 % t-interval: None for fewer than `FEWEST` values)."""
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return mean, None
    if np.ptp(values) <= 1e-9 * abs(mean):  # no variation but rounding, of which scipy warns
        return mean, (mean, mean)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return mean, (float(low), float(high))


def interval_of(a: Seeds, b: Seeds) -> tuple[float, str]:
    """(mean of a - b over the seeds of both, its 95 % t-interval and their number as text); 0 without such a seed."""
    differences = [a[seed] - b[seed] for seed in sorted(set(a) & set(b))]
    mean, interval = mean_interval(differences) if differences else (0.0, None)
    bounds = "?" if interval is None else "{:+.2f} to {:+.2f}".format(*interval)
    return mean, f"{bounds} ({len(differences)})"


def references_of(model: Model, models: Iterable[Model]) -> list[Model]:
    """Those of `models` that are the plain BERT-A (of ELECTRA: `electra_a`) of a model's size, after as many updates
    and fine-tuned with the same settings."""
    name, size = split_size(model.architecture)
    plain = with_size("electra_a" if name in ELECTRA else "bert_a", size)
    alike = (plain, "", model.updates, model.settings)
    return [m for m in sorted(models) if (m.architecture, m.variant, m.updates, m.settings) == alike]


class Pretraining(NamedTuple):
    """shared: what a model has in common with those that differ only in the seed of pre-training. training: how it was
    trained, whatever the model; None without a record of it."""

    shared: tuple
    training: tuple | None
    seed: int

    def unlike(self, other: "Pretraining") -> tuple[bool, bool]:
        return self.training != other.training, self.seed != other.seed


def pretraining_of(model: Model) -> Pretraining:
    """Without a record nothing is known: no other model shares it."""
    content = pretraining_record(model)
    if content is None:
        return Pretraining((model,), None, 0)
    known = content.task, content.lr, content.pretrained, content.pretrained_updates
    settings = settings_of(content)
    shared = model.architecture, model.variant, model.updates, model.settings, *known, settings_text(settings)
    others = {name: value for name, value in settings.items() if not name.startswith("model.")}
    return Pretraining(shared, (*known, settings_text(others)), content.seed)


def shown(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
