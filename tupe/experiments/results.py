"""From folders of fine-tuning runs to the paper's tables: collecting, summarising, comparing."""

import json
import math
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, data_utils
from scipy.stats import pearsonr

from ..architectures import split_size
from ..plugin.finetune import is_finished, read_result
from ..plugin.glue import TASKS
from ..record import state_of
from ..safe_load import num_updates, read_checkpoint
from .grid import Sweep
from .runner import read_failure

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
WANG_METRICS = {"MRPC": "f1", "QQP": "f1", "STS-B": "spearman"}  # elsewhere the paper's
MEAN = "mean of {} (F1, Spearman; no WNLI)"
PAPER_COLUMNS = [name for name in COLUMNS if name != "WNLI"]
EPOCHS = {"best": "best epoch of each run", "last": "last epoch of each run"}


# --------------------------------------------------------------------------------------------------------- collecting


@dataclass
class Collection:
    """What was found: finished runs {(model, task, lr, seed): result}, and everything else with its reason."""

    runs: dict = field(default_factory=dict)
    broken: dict = field(default_factory=dict)  # failed runs that said what they were, in the same way
    failed: list = field(default_factory=list)  # (folder, reason)
    missing: list = field(default_factory=list)  # (folder, "not started" or "running")
    left_out: list = field(default_factory=list)  # (folder, reason)


@dataclass(frozen=True, order=True)
class Model:
    """A pre-trained model: what the runs of one table row share."""

    architecture: str
    updates: int  # of pre-training
    checkpoint: str
    variant: str = ""  # how it differs from its architecture
    folder: str = ""  # of the checkpoint, as far as it is needed to tell two models apart

    @property
    def name(self):
        return f"{self.architecture}{self.variant and f' ({self.variant})'}{self.folder and f' [{self.folder}]'}"

    def __str__(self):
        return f"{self.name} @ {steps(self.updates)}"


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
    _tell_apart(found)
    for path in sweeps.values():
        _add_missing(found, path)
    if not found.runs and not found.failed:
        raise ValueError(f"no finished or failed run in {', '.join(map(str, folders))}")
    return found


def _add_run(found, path):
    try:
        result, failure = read_result(path), read_failure(path)
        if result is None:
            found.failed.append((path, failure["reason"]))
            return
        model = (
            result["architecture"], result["pretrained_updates"], result["pretrained"], result.get("variant", "")
        )  # fmt: skip
        key = Model(*model), result["task"], float(result["lr"]), int(result["seed"])
        result = {**result, "folder": str(path)}
        for name in ("command", "versions", "commit", "device", "finished_at"):
            result[name]
        if not is_finished(result):
            if failure:
                found.failed.append((path, failure["reason"]))
                found.broken[key] = result
            else:
                found.left_out.append((path, "not finished"))
            return
        if result["task"] == "MNLI" and len(result["splits"]) < 2:
            raise ValueError("MNLI without its second development set")
        for split in result["splits"]:
            for epoch in EPOCHS:
                for name in result["metrics"]:
                    float(scores(result, split, name, epoch))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        found.left_out.append((path, f"not a run of this project ({type(error).__name__}: {error})"))
        return
    if key in found.runs:
        same = found.runs[key]["records"] == result["records"]
        other = found.runs[key]["folder"]
        found.left_out.append((path, f"duplicate of {other}, {'same' if same else 'OTHER'} scores"))
    else:
        found.runs[key] = result


def _tell_apart(found):
    """Where checkpoints of two pre-training runs would have one name, all of that name get their folders added."""
    groups, names = defaultdict(set), {}
    for model, *_ in [*found.runs, *found.broken]:
        groups[model.architecture, model.variant].add(model)
    for models in groups.values():
        if len({model.updates for model in models}) == len(models):
            continue
        top = os.path.commonpath([Path(model.checkpoint).parent for model in models])
        paths = {model: Path(os.path.relpath(model.checkpoint, top)) for model in models}
        by_folder = len({(path.parent, model.updates) for model, path in paths.items()}) == len(models)
        names.update({model: str(path.parent if by_folder else path) for model, path in paths.items()})
    for kind in ("runs", "broken"):
        renamed = {
            (replace(model, folder=names.get(model, "")), *rest): run
            for (model, *rest), run in getattr(found, kind).items()
        }
        setattr(found, kind, renamed)


def _add_missing(found, folder):
    try:
        jobs = Sweep.read(folder).jobs
    except ValueError as error:
        found.left_out.append((folder, f"unreadable sweep.json ({error})"))
        return
    for job in jobs:
        state = _state_of(job.folder)
        if state in ("open", "running"):
            found.missing.append((job.folder, "running" if state == "running" else "not run yet"))


def _state_of(folder):
    """As long as runs leave scores.json and failed.json instead of a record."""
    state = state_of(folder)
    try:
        finished = is_finished(read_result(folder))
    except (ValueError, KeyError, TypeError):
        finished = False
    return "finished" if finished else "failed" if state == "open" and read_failure(folder) else state


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
    # Of the best configuration: the highest median over seeds of the first metric (mean over dev sets), among those
    # with the most seeds: what is left of a configuration whose other runs failed is no match for a whole one.
    lr: float

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
            most = max(map(len, by_lr.values()))
            whole = [lr for lr in by_lr if len(by_lr[lr]) == most]
            summary.lr = max(whole, key=lambda lr: statistics.mean(summary.median(*pair, lr) for pair in keys[task]))
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


def counterpart(table, model):
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


# ------------------------------------------------------------------------------------------------------------ tables


def lost(found):
    """{(model, task)} of which no run was finished and some failed."""
    return {key[:2] for key in found.broken} - {key[:2] for key in found.runs}


def paper_tables(summaries, lost=()):
    """The paper's tables with our rows: [(title, source, header, [(kind of row, cells)])]. lost: see `lost`."""
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
            failed = {c: "failed" for c in columns if (model, COLUMNS[c][0]) in lost}
            cells = [f"{row[c][0]:.2f}" if c in row else failed.get(c, "") for c in columns]
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


def score_columns(summaries):
    """All (task, split, metric) that some model has, in the order of the tables."""
    columns = {(task, *pair) for tasks in summaries.values() for task, s in tasks.items() for pair in _pairs(s)}
    return sorted(columns, key=lambda c: (list(TASKS).index(c[0]) if c[0] in TASKS else len(TASKS), c))


def score_name(column):
    task, split, metric = column
    return f"{task}{' (mm)' if split == 'valid1' else ''} {metric}"


def glue_mean(tasks, shared):
    """[mean over columns of GLUE, for each seed], with F1 for MRPC and QQP and Spearman for STS-B: Wang et al. (2021).

    shared: the columns that count; WNLI is never among them. Only seeds that all of them have.
    """
    by_seed = {task: tasks[task].by_lr[tasks[task].lr] for task, *_ in shared}
    seeds = sorted(set.intersection(*map(set, by_seed.values())))
    return [statistics.mean(by_seed[task][seed][split, metric] for task, split, metric in shared) for seed in seeds]


def mean_columns(summaries):
    """The columns of `glue_mean`, those that every model has."""
    columns = [(task, split, WANG_METRICS.get(task, metric)) for task, split, metric in COLUMNS.values()]
    return [c for c in columns if c[0] != "WNLI" and all(c[0] in tasks for tasks in summaries.values())]


def score_lists(summaries):
    """(names, {model: [scores over seeds, for each name]}) of the best configurations; [] where a model has none."""
    columns, shared = score_columns(summaries), mean_columns(summaries)
    averaged = len(shared) > 1
    lists = {}
    for model, tasks in summaries.items():
        lists[model] = [glue_mean(tasks, shared)] if averaged else []
        lists[model] += [tasks[task].values(split, metric) if task in tasks else [] for task, split, metric in columns]
    return [MEAN.format(len(shared))] * averaged + [*map(score_name, columns)], lists


def metric_table(summaries, lost=()):
    """Every score of the best configuration, mean and standard deviation over seeds: header, rows. lost: see `lost`."""
    names, lists = score_lists(summaries)
    rows = []
    for model, scores in lists.items():
        failed = {score_name(column): "failed" for column in score_columns(summaries) if (model, column[0]) in lost}
        cells = [
            f"{statistics.mean(values):.2f} ± {deviation(values)}" if values else failed.get(name, "")
            for name, values in zip(names, scores, strict=True)
        ]
        rows.append(["ours", [str(model), *cells]])
    return ["model", *names], rows


def _pairs(summary):
    return next(iter(next(iter(summary.by_lr.values())).values()))


def configuration_table(model, task, runs, broken):
    """Every learning rate and seed of a task: header, rows with the first metric at the best and the last epoch.
    broken: the runs that failed."""
    mine = {(lr, seed): result for (m, t, lr, seed), result in runs.items() if (m, t) == (model, task)}
    failed = {(lr, seed) for m, t, lr, seed in broken if (m, t) == (model, task)}
    seeds = sorted({seed for _, seed in {*mine, *failed}})
    rows = []
    for lr in sorted({lr for lr, _ in {*mine, *failed}}):
        for epoch in EPOCHS:
            values = {}
            for seed in seeds:
                if (lr, seed) in mine:
                    result = mine[lr, seed]
                    pairs = [(split, result["metrics"][0]) for split in result["splits"]]
                    values[seed] = statistics.mean(scores(result, *pair, epoch) for pair in pairs)
            lost = ["failed" if (lr, seed) in failed else "" for seed in seeds]
            cells = [f"{values[seed]:.2f}" if seed in values else gap for seed, gap in zip(seeds, lost, strict=True)]
            summary = ["", ""]
            if values:
                summary = [f"{statistics.median(values.values()):.2f}", deviation(list(values.values()))]
            rows.append([epoch, [f"{lr:g}", epoch, *cells, *summary]])
    return ["lr", "epoch", *(f"seed {seed}" for seed in seeds), "median", "deviation"], rows


# --------------------------------------------------------------------------------------------------------- pre-training

LEARNED = 1.0  # nats below the unigram entropy from which on a model counts as pre-trained


def unigram_entropy(data):
    """Nats per token of the training text's unigram distribution: the loss of a model that knows only frequencies.

    data: folder of pre-training data, with dict.txt and the split `train`.
    """
    dictionary = Dictionary.load(str(Path(data) / "dict.txt"))
    train = data_utils.load_indexed_dataset(str(Path(data) / "train"), dictionary, "mmap")
    if train is None:
        raise ValueError(f"{data} holds no pre-training data: there is no train split")
    counts = np.bincount(np.concatenate([train[i].numpy() for i in range(len(train))]))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def pretraining(models, data=None):
    """{model: (validation loss, unigram entropy)}, nats per token, of the checkpoints that models were fine-tuned from.

    data: folder of their pre-training data (default: the one in each checkpoint). Only of masked language models: other
    losses do not compare. Raises ValueError for a checkpoint that was trained on since.
    """
    found, entropies = {}, {}
    for model in models:
        state = read_checkpoint(model.checkpoint, mmap=True)
        if num_updates(state) != model.updates:
            raise ValueError(
                f"{model.checkpoint} is no longer the one that was fine-tuned, after {model.updates} updates"
            )
        if not state["cfg"]["criterion"]["_name"].startswith("masked_lm"):
            continue
        folder, loss = str(data or state["cfg"]["task"]["data"]), state["extra_state"].get("val_loss")
        if loss is None:
            raise ValueError(f"{model.checkpoint} holds no validation loss")
        if folder not in entropies:
            entropies[folder] = unigram_entropy(folder)
        found[model] = loss * math.log(2), entropies[folder]  # fairseq counts in bits
    return found


def pretraining_table(found):
    rows = []
    for model, (loss, entropy) in found.items():
        verdict = f"yes, {entropy - loss:.2f}" if entropy - loss >= LEARNED else f"FAILED, {entropy - loss:.2f}"
        rows.append(["ours", [str(model), f"{loss:.3f}", f"{entropy:.3f}", verdict]])
    return ["model", "MLM loss, validation (nats)", "unigram entropy (nats)", f"at least {LEARNED:g} nat below"], rows


# ---------------------------------------------------------------------------------------------------------- properties


def properties(models, data=None):
    """{model: {measure: value}}: identical-word probing (see `tupe.probes`) of each model's pre-trained checkpoint."""
    from ..evaluation.probes import identical_word_attention, load_model, measures

    return {model: measures(identical_word_attention(load_model(model.checkpoint, data)[0])) for model in models}


def correlations(found, summaries):
    """Pearson correlation over models of each property with each score (mean over seeds of the best configuration).

    Returns (header, rows); a cell is empty for fewer than three models, or where one side is constant. Over models with
    position encodings only, as Wang et al. (2021) take it.
    """
    names, lists = score_lists(summaries)
    models = [model for model in lists if model in found and "position nopos" not in model.variant]
    rows = []
    for measure in next(iter(found.values())):
        cells = []
        for i in range(len(names)):
            pairs = [
                (found[model][measure], statistics.mean(lists[model][i]))
                for model in models
                if lists[model][i] and math.isfinite(found[model][measure])
            ]
            varied = len(pairs) > 2 and all(len(set(side)) > 1 for side in zip(*pairs, strict=True))
            cells.append(f"{pearsonr(*zip(*pairs, strict=True))[0]:+.2f}" if varied else "")
        rows.append(["last", [measure, *cells]])
    return ["property", *names], rows


def property_table(found):
    measures = list(next(iter(found.values())))
    return ["model", *measures], [["ours", [str(m), *(f"{v[x]:.4g}" for x in measures)]] for m, v in found.items()]
