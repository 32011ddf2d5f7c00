"""How uncertain fine-tuning scores are, and from what: which examples are in the development set (bootstrap), the seeds
of fine-tuning, the seeds of pre-training. Differences between models are paired: the same examples, the same seeds."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from ..common import record
from ..common.architectures import ELECTRA, split_size, with_size
from ..common.tables import TextTable
from ..data.glue import METRICS, TASKS
from .runs import Collection, FinishedRun, Model, settings_of, settings_text
from .summary import Summary, score_name

Seeds = dict[int, float]
RESAMPLES = 200
FEWEST = 3  # seeds; an interval from two says more about the t-distribution than about the models


def values_of(run: FinishedRun, split: str, epoch: str) -> list[tuple] | None:
    """(prediction, target) of every example of a development set, in a fixed order; None if they were not kept.

    epoch: "best" or "last".
    """
    path = run.folder / "predictions" / f"{split}_{epoch}.tsv"
    if not path.exists():
        return None
    labels = TASKS[run.record.task].labels
    read = labels.index if labels else float
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [(read(prediction), read(target)) for _, prediction, target in rows]


def score_of(task: str, metric: str, values: np.ndarray) -> float:
    """The score, times 100, of `values_of` as an array [examples, 2]."""
    return 100 * float(METRICS[metric](values[:, 1], values[:, 0]))


def example_scores(runs: dict[int, FinishedRun], split: str, epoch: str) -> dict[str, dict[int, np.ndarray] | None]:
    """{metric: {seed: [RESAMPLES] scores of development sets whose examples are drawn anew}}, the same draws for all
    runs and metrics of a task; None for the seeds if predictions of a run were not kept."""
    first = next(iter(runs.values())).record
    values = {seed: values_of(run, split, epoch) for seed, run in runs.items()}
    if None in values.values():
        return dict.fromkeys(first.metrics)
    scores = {metric: {} for metric in first.metrics}
    for seed, pairs in values.items():
        pairs, rng = np.array(pairs), np.random.default_rng(1)
        drawn = [pairs[rng.integers(len(pairs), size=len(pairs))] for _ in range(RESAMPLES)]
        for metric in first.metrics:
            scores[metric][seed] = np.array([score_of(first.task, metric, values) for values in drawn])
    return scores


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def uncertainty_tables(
    collection: Collection, summaries: dict[Model, dict[str, Summary]], epoch: str
) -> list[TextTable]:
    """[scores with standard errors, differences from each model's reference] of every task, split and metric; the
    second is left out if no model has a reference."""
    rows, compared = [], []
    pretrainings = {model: pretraining_of(model) for model in summaries}
    repeats = defaultdict(list)  # {what repetitions of a pre-training share: [(seed, model)]}
    for model, (shared, seed) in pretrainings.items():
        repeats[shared].append((seed, model))
    cells, draws = {}, {}  # {model: {column: {seed: score}}}, and the same with example_scores
    for model, tasks in summaries.items():
        cells[model], draws[model] = {}, {}
        for task, summary in tasks.items():
            runs = {seed: collection.finished[model, task, summary.lr, seed] for seed in summary.by_lr[summary.lr]}
            for split in next(iter(runs.values())).record.splits:
                for metric, scores in example_scores(runs, split, epoch).items():
                    column = task, split, metric
                    cells[model][column] = {seed: run.score(split, metric, epoch) for seed, run in runs.items()}
                    draws[model][column] = scores

    def means_of(model, column):
        """{seed of the pre-training: mean over seeds of fine-tuning}; copies of one checkpoint are one."""
        group = repeats[pretrainings[model][0]]
        return {seed: statistics.mean(cells[m][column].values()) for seed, m in group if column in cells[m]}

    for model, columns in cells.items():
        reference = reference_of(model, summaries)
        for column, by_seed in columns.items():
            examples, means = draws[model][column], means_of(model, column)
            error = None if examples is None else float(np.mean(list(examples.values()), axis=0).std(ddof=1))
            spread = standard_error([*means.values()])
            rows.append([
                str(model), score_name(column), f"{statistics.mean(by_seed.values()):.2f}", shown(error),
                f"{shown(standard_error(list(by_seed.values())))} ({len(by_seed)})",
                f"{shown(spread)} ({len(means)})",
            ])  # fmt: skip
            if reference is None or column not in cells[reference]:
                continue
            theirs = cells[reference][column]
            seeds = sorted(set(by_seed) & set(theirs))
            if not seeds:
                continue
            alike = pretrainings[model][0] == pretrainings[reference][0]  # they differ only in the seed
            mean, over_seeds = interval_of(by_seed, theirs)
            _, over_pretraining = interval_of(means, {} if alike else means_of(reference, column))
            other, error = draws[reference][column], None
            if examples is not None and other is not None:
                error = float(np.mean([examples[seed] - other[seed] for seed in seeds], axis=0).std(ddof=1))
            compared.append([
                str(model), str(reference), score_name(column), f"{mean:+.2f}", shown(error), over_seeds,
                over_pretraining,
            ])  # fmt: skip
    header = ["model", "score", "mean", "development examples", "fine-tuning seeds", "pre-training seeds"]
    tables = [TextTable.plain(header, rows, align="llrrrr")]
    if compared:
        header = ["model", "minus", "score", "mean", "development examples"]
        header += ["95 % over fine-tuning seeds", "95 % over pre-training seeds"]
        tables.append(TextTable.plain(header, compared, align="lllrrrr"))
    return tables


@dataclass(frozen=True)
class Contrast:
    """Mean of a - b over the seeds that both have, with a 95 % t-interval and the two-sided p-value of the paired
    t-test. interval and p are None for fewer than `FEWEST` seeds."""

    mean: float
    interval: tuple[float, float] | None
    p: float | None
    differences: Seeds  # seed -> a - b


def contrast(a: Seeds, b: Seeds) -> Contrast:
    """Paired by seed. Raises ValueError if a and b have no seed in common."""
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    differences = {seed: a[seed] - b[seed] for seed in shared}
    return Contrast(*t_test([*differences.values()]), differences)


def t_test(values: list[float]) -> tuple[float, tuple[float, float] | None, float | None]:
    """(mean, its 95 % interval, two-sided p-value that it is 0); None for fewer than `FEWEST` values."""
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return mean, None, None
    if np.ptp(values) <= 1e-9 * abs(mean):  # no variation but rounding, of which scipy warns; with a mean of 0 p is nan
        return mean, (mean, mean), float(mean == 0)
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    return mean, (float(low), float(high)), float(test.pvalue)


def interval_of(a: dict[int, float], b: dict[int, float]) -> tuple[float, str]:
    """(mean of a - b over the seeds of both, its 95 % t-interval and their number as text); 0 without such a seed."""
    one = contrast(a, b) if set(a) & set(b) else Contrast(0.0, None, None, {})
    bounds = "?" if one.interval is None else "{:+.2f} to {:+.2f}".format(*one.interval)
    return one.mean, f"{bounds} ({len(one.differences)})"


def reference_of(model: Model, models: Iterable[Model]) -> Model | None:
    """The first of `models` that is the plain BERT-A (of ELECTRA: `electra_a`) of a model's size, after as many
    updates and fine-tuned with the same settings; None if there is none, or it is the model itself."""
    name, size = split_size(model.architecture)
    plain = with_size("electra_a" if name in ELECTRA else "bert_a", size)
    alike = (plain, "", model.updates, model.settings)
    found = [m for m in sorted(models) if (m.architecture, m.variant, m.updates, m.settings) == alike]
    return found[0] if found and found[0] != model else None


def pretraining_of(model: Model) -> tuple[tuple, int]:
    """(what the model shares with those that differ only in the seed of pre-training, that seed), from the record
    beside its checkpoint, or in it where that is a run's folder. Without one, or if it is another model's, nothing is
    known: no other model shares it."""
    checkpoint = Path(model.checkpoint)
    try:
        content = record.read(checkpoint if (checkpoint / record.NAME).is_file() else checkpoint.parent)
    except ValueError:
        content = None
    known = content and not content.metrics
    if not known or (content.architecture, content.variant) != (model.architecture, model.variant):
        return (model,), 0
    shared = (
        model.architecture, model.variant, model.updates, model.settings, content.task, content.lr,
        content.pretrained, content.pretrained_updates, settings_text(settings_of(content)),
    )  # fmt: skip
    return shared, content.seed


def shown(error: float | None) -> str:
    return "?" if error is None else f"{error:.2f}"
