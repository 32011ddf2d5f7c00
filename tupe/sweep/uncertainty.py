"""How uncertain fine-tuning scores are, and from what: which examples are in the development set (bootstrap), the seeds
of fine-tuning, the seeds of pre-training. Differences between models are paired: the same examples, the same seeds.
Intervals are scipy's t-intervals."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from scipy import stats

from ..common.architectures import ELECTRA, split_size, with_size
from ..common.tables import TextTable
from ..data.glue import score
from .collection import Collection, FinishedRun, Model, pretraining_record, settings_of, settings_text
from .scores import Summary, score_columns, score_name

Seeds = dict[int, float]
RESAMPLES = 200
FEWEST = 3  # seeds; an interval from two says more about the t-distribution than about the models
NO_BETTER = "†"  # behind a score that is no better than always giving one answer


def drawn_scores(run: FinishedRun, split: str, metric: str) -> np.ndarray | None:
    """[RESAMPLES] scores of development sets whose examples are drawn anew, the same draws for all runs of a task; None
    if the run's predictions were not kept."""
    pairs = run.predictions(split)
    if pairs is None:
        return None
    rng = np.random.default_rng(1)
    drawn = (pairs[rng.integers(len(pairs), size=len(pairs))] for _ in range(RESAMPLES))
    return np.array([score([metric], values[:, 0], values[:, 1])[metric] for values in drawn])


def bootstrap_error(draws: list) -> float | None:
    """Standard error of the mean over runs, over the same draws; None if those of one are not known."""
    if any(one is None for one in draws):
        return None
    return float(np.mean(draws, axis=0).std(ddof=1))


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


class Uncertainty:
    """Of the scores of each model's best configurations."""

    def __init__(self, collection: Collection, summaries: dict[Model, dict[str, Summary]]):
        self.summaries, self.columns = summaries, score_columns(summaries)
        self.scores, self.draws = {}, {}  # {(model, column): {seed: score}}, and the same with `drawn_scores`
        for model, tasks in summaries.items():
            for task, split, metric in self.columns:
                if task in tasks and (split, metric) in tasks[task].pairs():
                    best = tasks[task].by_lr[tasks[task].lr]
                    runs = {seed: collection.finished[model, task, tasks[task].lr, seed] for seed in best}
                    place = model, (task, split, metric)
                    self.scores[place] = {seed: scores[split, metric] for seed, scores in best.items()}
                    self.draws[place] = {seed: drawn_scores(run, split, metric) for seed, run in runs.items()}
        self.pretrainings = {model: pretraining_of(model) for model in summaries}
        self.repeats = defaultdict(list)  # {what repetitions of a pre-training share: [(seed, model)]}
        for model, (shared, seed) in self.pretrainings.items():
            self.repeats[shared].append((seed, model))

    def means(self, model: Model, column: tuple) -> Seeds:
        """{seed of the pre-training: mean over seeds of fine-tuning}; copies of one checkpoint are one."""
        group = self.repeats[self.pretrainings[model][0]]
        return {
            seed: statistics.mean(self.scores[one, column].values())
            for seed, one in group
            if (one, column) in self.scores
        }

    def score_table(self, baselines: dict) -> TextTable:
        """Every score with its standard errors. baselines: what `majority` returns."""
        rows = []
        for column in self.columns:
            if column in baselines:
                rows.append(["majority", score_name(column), "", shown(baselines[column]), "", "", ""])
            for model, tasks in self.summaries.items():
                if (model, column) in self.scores:
                    values, means = [*self.scores[model, column].values()], [*self.means(model, column).values()]
                    mean = statistics.mean(values)
                    deviation = shown(statistics.stdev(values) if len(values) > 1 else None)
                    mark = NO_BETTER if column in baselines and mean <= baselines[column] + 1e-9 else ""
                    rows.append([
                        str(model), score_name(column), f"{tasks[column[0]].lr:g}",
                        f"{mean:.2f} ± {deviation}{mark}",
                        shown(bootstrap_error([*self.draws[model, column].values()])),
                        f"{shown(standard_error(values))} ({len(values)})",
                        f"{shown(standard_error(means))} ({len(means)})",
                    ])  # fmt: skip
        header = ["model", "score", "learning rate", "mean ± deviation"]
        header += [
            f"error by {source}" for source in ("development examples", "fine-tuning seeds", "pre-training seeds")
        ]
        return TextTable.plain(header, rows, align="llrrrrr")

    def difference_table(self) -> TextTable:
        """Differences from each model's reference; without rows if none has one."""
        rows = []
        for (model, column), ours in self.scores.items():
            reference = reference_of(model, self.summaries)
            theirs = self.scores.get((reference, column), {})
            seeds = sorted(set(ours) & set(theirs))
            if not seeds:
                continue
            mean, over_seeds = interval_of(ours, theirs)
            alike = self.pretrainings[model][0] == self.pretrainings[reference][0]  # they differ only in the seed
            others = {} if alike else self.means(reference, column)
            _, over_pretraining = interval_of(self.means(model, column), others)
            pairs = [(self.draws[model, column][seed], self.draws[reference, column][seed]) for seed in seeds]
            draws = [None if a is None or b is None else a - b for a, b in pairs]
            rows.append([
                str(model), str(reference), score_name(column), f"{mean:+.2f}", shown(bootstrap_error(draws)),
                over_seeds, over_pretraining,
            ])  # fmt: skip
        header = ["model", "minus", "score", "mean", "error by development examples"]
        header += ["95 % over fine-tuning seeds", "95 % over pre-training seeds"]
        return TextTable.plain(header, rows, align="lllrrrr")


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


def reference_of(model: Model, models: Iterable[Model]) -> Model | None:
    """The first of `models` that is the plain BERT-A (of ELECTRA: `electra_a`) of a model's size, after as many
    updates and fine-tuned with the same settings; None if there is none, or it is the model itself."""
    name, size = split_size(model.architecture)
    plain = with_size("electra_a" if name in ELECTRA else "bert_a", size)
    alike = (plain, "", model.updates, model.settings)
    found = [m for m in sorted(models) if (m.architecture, m.variant, m.updates, m.settings) == alike]
    return found[0] if found and found[0] != model else None


def pretraining_of(model: Model) -> tuple[tuple, int]:
    """(what the model shares with those that differ only in the seed of pre-training, that seed). Without a record of
    it nothing is known: no other model shares it."""
    content = pretraining_record(model)
    if content is None:
        return (model,), 0
    shared = (
        model.architecture, model.variant, model.updates, model.settings, content.task, content.lr,
        content.pretrained, content.pretrained_updates, settings_text(settings_of(content)),
    )  # fmt: skip
    return shared, content.seed


def shown(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
