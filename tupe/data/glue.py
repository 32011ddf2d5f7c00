"""GLUE, for both engines: a table of its tasks, their prepared data, unrounded scores and files of predictions. The
official files: `tupe.corpus.tasks`. A task with labels of one's own joins the table where its data, its checkpoint or
the record of one of its runs is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..common.options import task_key
from ..run.checksums import check
from ..run.folder import write_atomically
from ..text import TextEncoder
from .splits import Split, read_symbols

FIRST_LABEL = len(TextEncoder.SPECIALS)  # the id of a task's first label in its prepared data


@dataclass(frozen=True)
class Glue:
    """One GLUE task: the layout of its official files, and its scores."""

    text: tuple  # columns of the one or two sentences
    label: str  # column of the label
    labels: tuple  # class names in the order of the class ids; () for a regression, from 0 to `top`
    metrics: tuple  # the first one selects the best epoch
    header: tuple = ()  # columns of train and dev, if the files have no header line
    errors: str = "strict"  # "replace": rows that lack a field are dropped, not refused
    top: float = 1.0
    own: bool = False  # not of GLUE
    files: tuple = (("train", "train.tsv"), ("valid", "dev.tsv"), ("test", "test.tsv"))

    @property
    def outputs(self) -> int:
        """Number of outputs of the model: classes, or 1 for a regression."""
        return len(self.labels) or 1

    @property
    def names(self) -> tuple:
        """The names of the outputs."""
        return self.labels or ("score",)

    @property
    def range(self) -> list | None:
        """[least, greatest] label of a regression, for which a head's own outputs are 0 and 1; None for classes."""
        return None if self.labels else [0.0, self.top]

    def plain(self) -> dict | None:
        """What JSON can hold of a task that is not of GLUE, and `own_task` reads."""
        return {name: getattr(self, name) for name in LAYOUT} if self.own else None


LAYOUT = ("text", "label", "labels", "metrics", "own")  # of a task that is not of GLUE
ENTAILMENT = ("entailment", "not_entailment")
BINARY = ("0", "1")
MNLI_FILES = (
    ("train", "train.tsv"),
    ("valid", "dev_matched.tsv"),
    ("valid1", "dev_mismatched.tsv"),
    ("test", "test_matched.tsv"),
    ("test1", "test_mismatched.tsv"),
    ("ax", "../AX/AX.tsv"),  # the diagnostic set is scored with the MNLI model
)
TASKS = {
    "CoLA": Glue(
        ("sentence",), "label", BINARY, ("matthews", "accuracy"), header=("source", "label", "mark", "sentence")
    ),
    "SST-2": Glue(("sentence",), "label", BINARY, ("accuracy",)),
    "MRPC": Glue(("#1 String", "#2 String"), "Quality", BINARY, ("accuracy", "f1")),
    "STS-B": Glue(("sentence1", "sentence2"), "score", (), ("pearson", "spearman"), top=5.0),
    "QQP": Glue(("question1", "question2"), "is_duplicate", BINARY, ("accuracy", "f1"), errors="replace"),
    "MNLI": Glue(
        ("sentence1", "sentence2"),
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        files=MNLI_FILES,
    ),  # fmt: skip
    "QNLI": Glue(("question", "sentence"), "label", ENTAILMENT, ("accuracy",)),
    "RTE": Glue(("sentence1", "sentence2"), "label", ENTAILMENT, ("accuracy",)),
    "WNLI": Glue(("sentence1", "sentence2"), "label", BINARY, ("accuracy",)),
}


def own_task(content: dict) -> Glue:
    """The task that `Glue.plain` described."""
    found = {name: content[name] for name in LAYOUT}
    return Glue(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


def task_of(folder: Path) -> Glue:
    """The task that is prepared in a folder: GLUE's of that name, or one with labels of its own, which is then known by
    its name too."""
    manifest = folder / "manifest.json"
    check(manifest)
    content = json.loads(manifest.read_text(encoding="utf-8")).get("layout") if manifest.is_file() else None
    if content:
        TASKS[folder.name] = own_task(content)
    if folder.name not in TASKS:
        raise ValueError(f"{folder}: neither the name of a task of GLUE nor one with labels of its own")
    return TASKS[folder.name]


def glue_name(name: str, data: str | Path | None = None) -> str:
    """The official spelling of a task's name: "sts_b" and "stsb" are "STS-B". data: folder with tasks of its own.
    Raises ValueError for an unknown one."""
    for manifest in sorted(Path(data).glob("[!.]*/manifest.json")) if data else ():
        if task_key(manifest.parent.name) == task_key(name):
            task_of(manifest.parent)
            return manifest.parent.name
    for official in TASKS:
        if task_key(official) == task_key(name):
            return official
    raise ValueError(f"unknown GLUE task {name!r}; valid: {', '.join(TASKS)}")


# -------------------------------------------------------------------------------------------------------- prepared data


def check_glue(folder: Path, split: str, labelled: bool = False) -> None:
    """Raise ValueError, naming the file, unless the data of a split is there, whole and of one length. folder: of the
    task; labelled: labels have to be there, too."""
    task, lengths, types = task_of(folder), {}, len(read_symbols(folder.parent))
    check(folder / "label" / "dict.txt")
    for number in range(len(task.text)):
        prefix = folder / f"input{number}" / split
        lengths[f"{prefix}.idx"] = len(Split(prefix, types))
    labels = folder / "label" / split
    if task.labels and (folder / "label" / f"{split}.idx").exists():
        lengths[f"{labels}.idx"] = len(Split(labels))
    elif not task.labels and (scores := folder / "label" / f"{split}.label").exists():
        lengths[scores] = scores.read_bytes().count(b"\n")
    elif labelled:
        raise ValueError(f"{folder}: the split {split!r} has no labels; train and validate on one that has")
    first, *others = lengths
    for other in others:
        if lengths[other] != lengths[first]:
            raise ValueError(f"{other} has {lengths[other]} rows, {first} {lengths[first]}; prepare the data again")


def read_targets(folder: Path, split: str) -> list | None:
    """Class ids or real numbers of a split, in file order; None for a test set. folder: of the task."""
    prefix = folder / "label" / split
    if not task_of(folder).labels:
        path = Path(f"{prefix}.label")
        check(path)
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else None
    return [int(ids[0]) - FIRST_LABEL for ids in Split(prefix)] if Path(f"{prefix}.idx").exists() else None


def lengths(sizes: Sequence, limit: int) -> tuple[np.ndarray, int]:
    """(how many tokens of each sentence are kept [examples, sentences], how many examples lose some): at most `limit`
    of `<s> A </s>` or `<s> A </s> </s> B </s>`.

    A pair that is too long loses tokens from the end of the longer sentence; both sentences and the separators stay.
    sizes: of the first sentences and, if there are any, of the second ones.
    """
    special = 2 * len(sizes)
    if limit < special + 2:
        raise ValueError(f"a model of {limit} positions has no room for {special} special tokens and two sentences")
    a, *b = (np.asarray(some) for some in sizes)
    b, room = b[0] if b else np.zeros_like(a), limit - special
    keep = np.where(a + b <= room, a, np.maximum(np.minimum(a, room - room // 2), np.minimum(a, room - b)))
    return np.stack([keep, np.minimum(b, room - keep)], axis=1)[:, : len(sizes)], int((a + b > room).sum())


def write_predictions(
    glue: Glue, predictions: Mapping, targets: Sequence, run: Path, split: str, best: bool
) -> None:  # fmt: skip
    """Write predictions/SPLIT_last.tsv into a run's folder, and SPLIT_best.tsv if its scores are the best so far.
    Tab-separated: row number in the official file (without dropped rows), prediction, target, both as the official file
    has them. predictions: of each row."""
    text = glue.labels.__getitem__ if glue.labels else lambda value: f"{value * glue.top:.9g}"
    rows = [f"{i}\t{text(predictions[i])}\t{text(target)}\n" for i, target in enumerate(targets)]
    folder = run / "predictions"
    folder.mkdir(parents=True, exist_ok=True)
    for tag in ["last"] + ["best"] * best:
        write_atomically(folder / f"{split}_{tag}.tsv", "".join(["index\tprediction\ttarget\n", *rows]))


# ------------------------------------------------------------------------------------------------------------ scores


def score(names: Sequence, predictions: Sequence, targets: Sequence) -> dict:
    """Scores over whole lists, as plain floats times 100.

    predictions, targets: class ids, or real numbers for correlations. A correlation that is undefined, because one side
    is constant, counts as 0, as scikit-learn's Matthews coefficient does. Raises FloatingPointError for predictions
    that are not finite.
    """
    from scipy import stats
    from sklearn import metrics  # takes as long as torch: not before it is needed

    predictions, targets = np.asarray(predictions), np.asarray(targets)
    if not np.isfinite(predictions).all():
        raise FloatingPointError("the model predicts numbers that are not finite")
    constant = np.ptp(predictions) == 0 or np.ptp(targets) == 0
    measures = {
        "accuracy": metrics.accuracy_score,
        "f1": partial(metrics.f1_score, zero_division=0),
        "macro_f1": partial(metrics.f1_score, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda *both: 0.0 if constant else stats.pearsonr(*both)[0],
        "spearman": lambda *both: 0.0 if constant else stats.spearmanr(*both)[0],
    }
    return {name: 100 * float(measures[name](targets, predictions)) for name in names}
