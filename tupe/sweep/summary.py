"""Numbers from collected runs: medians over seeds and the learning rate that wins, averages, baselines, published
scores to compare with, and what the pre-trained models themselves tell."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import pearsonr

from ..checkpoints.gate import read_checkpoint
from ..checkpoints.trained import updates_of
from ..common import record
from ..common.architectures import split_size
from ..data.glue import TASKS, score
from ..data.splits import Split, prefixes_of
from ..evaluate.loading import load_model
from ..evaluate.probes import identical_word_attention, measures
from .runs import Model

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
WANG_METRICS = {"MRPC": "f1", "QQP": "f1", "STS-B": "spearman"}  # elsewhere the paper's


# ----------------------------------------------------------------------------------------------------- configurations


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


def summarise(runs: dict, epoch: str) -> dict:
    """{model: {task: Summary}} of finished runs {key: Run}. epoch: "best" or "last"."""
    grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    firsts = {}
    for (model, task, lr, seed), run in sorted(runs.items(), key=lambda item: item[0]):
        pairs = [(split, metric) for split in run.record.splits for metric in run.record.metrics]
        grouped[model][task][lr][seed] = {pair: run.score(*pair, epoch) for pair in pairs}
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


# ---------------------------------------------------------------------------------------------- averages over columns


def paper_row(tasks: dict) -> dict:
    """{column: (median of the best configuration, scores of its seeds)} of the columns that a model has."""
    row = {}
    for column, (task, split, metric) in COLUMNS.items():
        if task in tasks:
            row[column] = tasks[task].median(split, metric), tasks[task].values(split, metric)
    return row


def average(values: dict, columns: Sequence = PAPER_COLUMNS) -> float | None:
    """The paper's average: the mean over its nine columns, MNLI-m and -mm separate; None if one is missing."""
    return statistics.mean(values[column] for column in columns) if all(c in values for c in columns) else None


def glue_mean(tasks: dict, columns: Sequence) -> list:
    """Mean over columns, for each seed that all of them have. columns: (task, split, metric), see `mean_columns`."""
    by_seed = {task: tasks[task].by_lr[tasks[task].lr] for task, *_ in columns}
    seeds = sorted(set.intersection(*map(set, by_seed.values())))
    return [statistics.mean(by_seed[task][seed][split, metric] for task, split, metric in columns) for seed in seeds]


def mean_columns(summaries: dict) -> list:
    """(task, split, metric) of the mean over GLUE of Wang et al. (2021), as far as every model has them: a column per
    task, MNLI's the matched one, F1 for MRPC and QQP, Spearman for STS-B, no WNLI. [] where it would be the mean of
    one."""
    columns = [(task, split, WANG_METRICS.get(task, metric)) for task, split, metric in COLUMNS.values()]
    columns = [(task, split, metric) for task, split, metric in columns if task != "WNLI" and split == "valid"]
    shared = [column for column in columns if all(column[0] in tasks for tasks in summaries.values())]
    return shared if len(shared) > 1 else []


def score_columns(summaries: dict) -> list:
    """All (task, split, metric) that some model has, in the order of the tables."""
    tasks = [item for tasks in summaries.values() for item in tasks.items()]
    columns = {(task, *pair) for task, summary in tasks for pair in summary.pairs()}
    return sorted(columns, key=lambda c: (list(TASKS).index(c[0]) if c[0] in TASKS else len(TASKS), c))


def score_name(column: tuple) -> str:
    task, split, metric = column
    return f"{task}{' (mm)' if split == 'valid1' else ''} {metric}"


def score_lists(summaries: dict) -> dict:
    """{model: {name: scores of the seeds}} of the best configurations, the mean over GLUE first; [] where a model has
    none."""
    shared, columns = mean_columns(summaries), score_columns(summaries)
    lists = {}
    for model, tasks in summaries.items():
        lists[model] = {mean_name(shared): glue_mean(tasks, shared)} if shared else {}
        for task, *pair in columns:
            lists[model][score_name((task, *pair))] = tasks[task].values(*pair) if task in tasks else []
    return lists


def mean_name(columns: Sequence) -> str:
    return f"mean of {len(columns)} (F1, Spearman; no WNLI)"


# ------------------------------------------------------------------------------------------------------ to compare with


def majority(runs: dict) -> dict:
    """{(task, split, metric): score} of always giving the same answer, the best one for the metric; 0 for correlations.

    Computed from the targets beside the runs' predictions.
    """
    baselines = {}
    for run in runs.values():
        task = run.record.task
        for split in run.record.splits:
            if (task, split, run.record.metrics[0]) not in baselines:
                scores = majority_of(task, run.folder / "predictions", split)
                baselines.update({(task, split, metric): value for metric, value in scores.items()})
    return baselines


def majority_of(task: str, predictions: Path, split: str) -> dict:
    """{metric: score} of always giving the same answer to one split; {} if a run's folder of predictions lacks the
    targets."""
    table = predictions / f"{split}_last.tsv"
    if not table.exists():
        return {}
    targets = [row.split("\t")[2] for row in table.read_text(encoding="utf-8").splitlines()[1:]]
    return constant_scores(task, targets)


def constant_scores(task: str, targets: Sequence[str]) -> dict:
    """{metric: score} of the best constant answer to a task of GLUE. targets: as they stand in files of predictions."""
    glue = TASKS[task]
    values = [glue.labels.index(target) if glue.labels else float(target) for target in targets]
    tried = [score(glue.metrics, [answer] * len(values), values) for answer in (set(values) if glue.labels else {0.0})]
    return {metric: max(scores[metric] for scores in tried) for metric in glue.metrics}


def published() -> dict:
    """The tables of the paper, see published.json."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def counterpart(table: dict, model: Model) -> dict | None:
    """The published row to compare a model with, or None (as for a variant of an architecture).

    It is the one of the same architecture and size at the nearest number of updates; for the sizes that no paper has,
    the fully trained base row.
    """
    name, size = split_size(model.architecture)
    wanted = "base" if size in ("small", "mini", "tiny") else size
    rows = [row for row in table["rows"] if split_size(row["architecture"]) == (name, wanted)]
    if model.variant:
        return None
    if size != wanted:
        return max(rows, key=lambda row: row["updates"], default=None)
    return min(rows, key=lambda row: abs(row["updates"] - model.updates), default=None)


# ----------------------------------------------------------------------------------------------- the pre-trained models


def unigram_entropy(data: str | Path) -> float:
    """Nats per token of the training text's unigram distribution: the loss of a model that knows only frequencies.

    data: folders of pre-training data, with dict.txt and the split `train`. Raises ValueError if that is not there.
    """
    counts = np.zeros(0)
    for prefix in prefixes_of(data, "train"):
        tokens = Split(prefix).tokens
        for start in range(0, len(tokens), 2**20):  # the text may be larger than memory
            found = np.bincount(tokens[start : start + 2**20], minlength=len(counts))
            counts = found + np.pad(counts, (0, len(found) - len(counts)))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def pretraining(models: Iterable[Model], data: str | Path | None = None) -> dict:
    """{model: (validation loss, unigram entropy)}, nats per token, of the checkpoints that models were fine-tuned from.

    data: folder of their pre-training data (default: the one in each checkpoint). Only of masked language models: other
    losses do not compare. Raises ValueError for a checkpoint that was trained on since.
    """
    losses, entropies = {}, {}
    for model in models:
        check_unchanged(model)
        if Path(model.checkpoint).is_dir():
            about = record.read(model.checkpoint)
            if about and about.task != "masked_lm":
                continue
            scores = about.scores if about else []
            loss, folder = (scores[-1]["loss"] if scores else None), str(data or model.checkpoint)
        else:
            state = read_checkpoint(model.checkpoint, mmap=True)
            if not state["cfg"]["criterion"]["_name"].startswith("masked_lm"):
                continue
            folder, loss = str(data or state["cfg"]["task"]["data"]), state["extra_state"].get("val_loss")
        if loss is None:
            raise ValueError(f"{model.checkpoint} holds no validation loss")
        if folder not in entropies:
            entropies[folder] = unigram_entropy(folder)
        losses[model] = loss * math.log(2), entropies[folder]  # fairseq counts in bits
    return losses


def check_unchanged(model: Model) -> None:
    """Raise ValueError for a checkpoint that was trained on since its fine-tuning."""
    if updates_of(model.checkpoint) != model.updates:
        raise ValueError(f"{model.checkpoint} is no longer the one that was fine-tuned, after {model.updates} updates")


def properties(models: Iterable[Model], data: str | Path | None = None) -> dict:
    """{model: {measure: value}}: identical-word probing of each model's pre-trained checkpoint. Raises ValueError for a
    checkpoint that was trained on since."""
    models = list(models)
    for model in models:
        check_unchanged(model)
    loaded = ((model, *load_model(model.checkpoint, data)) for model in models)
    return {model: measures(identical_word_attention(net, text.symbols)) for model, net, text in loaded}


def correlations(probed: dict, summaries: dict) -> dict:
    """{measure: {name of a score: Pearson correlation over models}}, scores as means over seeds; None for fewer than
    three models, or where one side is constant. Over models with position encodings only, as Wang et al. (2021) do.

    probed: see `properties`. summaries: see `summarise`.
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
