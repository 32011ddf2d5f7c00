"""GLUE: a table of its tasks, and a fairseq task and criterion with unrounded scores. The data: `glue_data`.

B batch, L length of a pair of sentences with its special tokens, K classes (1 for a regression).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.data import (
    BaseWrapperDataset,
    Dictionary,
    FairseqDataset,
    IdDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    RawLabelDataset,
    RightPadDataset,
    data_utils,
)
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqDataclass, register_task
from omegaconf import II, MISSING, DictConfig
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ..common.options import shorten_list, task_key
from ..common.record import write_atomically
from .criterion import count_tokens
from .finetune import FinetuneConfig, FinetuneCriterion, FinetuneTask
from .pretrained import check_split


@dataclass(frozen=True)
class Glue:
    """One GLUE task: the layout of its official files, and its scores."""

    text: tuple  # columns of the one or two sentences
    label: str  # column of the label
    labels: tuple  # class names in the order of the class ids; () for a regression, with scores from 0 to `top`
    metrics: tuple  # the first one selects the best epoch
    header: tuple = ()  # columns of train and dev, if the files have no header line
    columns: int = 0  # if set: rows of train and dev with another number of fields are dropped, not refused
    top: float = 1.0
    files: tuple = (("train", "train.tsv"), ("valid", "dev.tsv"), ("test", "test.tsv"))

    @property
    def outputs(self) -> int:
        """Number of outputs of the model: classes, or 1 for a regression."""
        return len(self.labels) or 1


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
    "QQP": Glue(("question1", "question2"), "is_duplicate", BINARY, ("accuracy", "f1"), columns=6),
    "MNLI": Glue(
        ("sentence1", "sentence2"),
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        files=MNLI_FILES,
    ),
    "QNLI": Glue(("question", "sentence"), "label", ENTAILMENT, ("accuracy",)),
    "RTE": Glue(("sentence1", "sentence2"), "label", ENTAILMENT, ("accuracy",)),
    "WNLI": Glue(("sentence1", "sentence2"), "label", BINARY, ("accuracy",)),
}


def glue_name(name: str) -> str:
    """The official spelling of a task's name: "sts_b" and "stsb" are "STS-B". Raises ValueError for an unknown one."""
    for official in TASKS:
        if task_key(official) == task_key(name):
            return official
    raise ValueError(f"unknown GLUE task {name!r}; valid: {', '.join(TASKS)}")


def label_dictionary(task: Glue) -> Dictionary:
    """fairseq dictionary of the class names, in the table's order."""
    dictionary = Dictionary()
    for label in task.labels:
        dictionary.add_symbol(label)
    return dictionary


def check_glue(folder: Path, split: str) -> None:
    """Raise ValueError, naming the file, unless the data of a split is whole and of one length. folder: of the task."""
    task, lengths, order = TASKS[folder.name], {}, folder / "label" / "dict.txt"
    if task.labels and order.is_file():
        names = [line.rsplit(" ", 1)[0] for line in order.read_text(encoding="utf-8").splitlines()]
        if tuple(names) != task.labels:  # the ids would be taken for other labels
            wrong, right = shorten_list(names), shorten_list(task.labels)
            raise ValueError(f"{order}: labels {wrong}, not {right}; prepare the data again")
    for number in range(len(task.text)):
        prefix = folder / f"input{number}" / split
        lengths[f"{prefix}.idx"] = check_split(prefix)
    labels = folder / "label" / split
    if task.labels and (folder / "label" / f"{split}.idx").exists():
        lengths[f"{labels}.idx"] = check_split(labels)
    elif not task.labels and (scores := folder / "label" / f"{split}.label").exists():
        lengths[scores] = scores.read_bytes().count(b"\n")
    first, *others = lengths
    for other in others:
        if lengths[other] != lengths[first]:
            raise ValueError(f"{other} has {lengths[other]} rows, {first} {lengths[first]}; prepare the data again")


# ------------------------------------------------------------------------------------------------------------ scores


def score(names: Sequence, predictions: Sequence, targets: Sequence) -> dict:
    """Scores over whole lists, as plain floats times 100.

    predictions, targets: class ids, or real numbers for correlations. A correlation that is undefined, because one side
    is constant, counts as 0, as scikit-learn's Matthews coefficient does. Raises FloatingPointError for predictions
    that are not finite.
    """
    predictions, targets = np.asarray(predictions), np.asarray(targets)
    if not np.isfinite(predictions).all():
        raise FloatingPointError("the model predicts numbers that are not finite")
    return {name: 100 * float(METRICS[name](targets, predictions)) for name in names}


def _correlation(function):
    def correlate(targets, predictions):
        constant = np.ptp(predictions) == 0 or np.ptp(targets) == 0
        return 0.0 if constant else function(targets, predictions)[0]

    return correlate


METRICS = {
    "accuracy": accuracy_score,
    "f1": lambda targets, predictions: f1_score(targets, predictions, zero_division=0),
    "matthews": matthews_corrcoef,
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}


# --------------------------------------------------------------------------------------------------- task, criterion


@dataclass
class GlueConfig(FinetuneConfig):
    data: str = field(default=MISSING, metadata={"help": "folder that `tupe prepare glue` wrote"})
    glue_task: str = field(default=MISSING, metadata={"help": f"one of {', '.join(TASKS)}"})
    classification_head_name: str = II("criterion.classification_head_name")


class Pairs(BaseWrapperDataset):
    """`<s> A </s>` or `<s> A </s> </s> B </s>`, at most `limit` tokens.

    A pair that is too long loses tokens from the end of the longer sentence; both sentences and the separators stay.
    """

    def __init__(self, first: FairseqDataset, second: FairseqDataset | None, dictionary: Dictionary, limit: int):
        super().__init__(first)
        self.second, self.bos, self.eos = second, dictionary.bos(), dictionary.eos()
        special = 2 if second is None else 4
        a = np.asarray(first.sizes) - 1  # each item ends in </s>
        b = np.zeros_like(a) if second is None else np.asarray(second.sizes) - 1
        if limit < special + 2:
            raise ValueError(f"a model of {limit} positions has no room for {special} special tokens and two sentences")
        room = limit - special
        keep_a = np.where(a + b <= room, a, np.maximum(np.minimum(a, room - room // 2), np.minimum(a, room - b)))
        self.keep = np.stack([keep_a, np.minimum(b, room - keep_a)], axis=1)
        self._sizes = self.keep.sum(axis=1) + special
        self.shortened = int((a + b > room).sum())

    @property
    def sizes(self) -> np.ndarray:
        return self._sizes

    def num_tokens(self, index: int) -> int:
        return int(self._sizes[index])

    size = num_tokens

    def __getitem__(self, index):
        (a, b), bos, eos = self.keep[index], torch.tensor([self.bos]), torch.tensor([self.eos])
        parts = [bos, self.dataset[index][:a], eos]
        if self.second is not None:
            parts += [eos, self.second[index][:b], eos]
        return torch.cat(parts).long()


class SplitName(NumSamplesDataset):
    """Puts the name of the split into each batch."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def collater(self, samples: list) -> str:
        return self.name


@register_task("glue", dataclass=GlueConfig)
class GlueTask(FinetuneTask):
    """Classification or regression of one sentence or two; `TASKS` has everything that depends on the dataset."""

    def __init__(self, cfg: DictConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.name = glue_name(cfg.glue_task)
        self.glue = TASKS[self.name]
        self.metrics = self.glue.metrics
        self.label_dictionary = label_dictionary(self.glue)
        self.targets = functools.cache(self.read_targets)

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.glue.outputs)
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        folder = Path(self.cfg.data) / self.name
        if not (folder / "input0" / f"{split}.idx").exists():
            raise FileNotFoundError(f"{folder} has no split {split!r}; `tupe prepare glue` writes it")
        check_glue(folder, split)
        inputs = [self._load_inputs(folder / f"input{i}" / split) for i in range(len(self.glue.text))]
        tokens = Pairs(inputs[0], inputs[1] if len(inputs) == 2 else None, self.dictionary, self.max_positions())
        data = {
            "id": IdDataset(),
            "split": SplitName(split),
            "net_input": {
                "src_tokens": RightPadDataset(tokens, pad_idx=self.dictionary.pad()),
                "src_lengths": NumelDataset(tokens, reduce=False),
            },
            "nsentences": NumSamplesDataset(),
            "ntokens": NumelDataset(tokens, reduce=True),
        }
        targets = self.targets(split)
        if targets is not None:
            data["target"] = RawLabelDataset(targets)
        with data_utils.numpy_seed(self.cfg.seed):
            shuffled = np.argsort(np.random.permutation(len(tokens)))
        self.datasets[split] = NestedDictionaryDataset(data, sizes=[tokens.sizes])
        self.set_batch_order(split, self.datasets[split], tokens.sizes, shuffled)
        self.note_shortened(split, tokens.shortened, len(tokens))

    def _load_inputs(self, prefix):
        return data_utils.load_indexed_dataset(str(prefix), self.dictionary)

    def read_targets(self, split: str) -> list | None:
        """Class ids or real numbers of a split, in file order; None for a test set."""
        folder = Path(self.cfg.data) / self.name / "label"
        if self.glue.labels:
            if not (folder / f"{split}.idx").exists():
                return None
            labels, offset = data_utils.load_indexed_dataset(str(folder / split)), self.label_dictionary.nspecial
            return [int(labels[i][0]) - offset for i in range(len(labels))]
        path = folder / f"{split}.label"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else None

    def evaluate(self, split: str) -> dict:
        predictions = self.predictions[split]
        return score(self.metrics, [predictions[i] for i in range(len(predictions))], self.targets(split))

    def record_name(self, config: DictConfig) -> str:
        return self.name

    def data_files(self, split: str) -> list[Path]:
        return sorted(Path(self.cfg.data, self.name).glob(f"*/{split}.*"))

    def write_predictions(self, split: str, stem: str | Path) -> None:
        """Tab-separated: row number in the official file (without dropped rows), prediction, target."""
        names = self.glue.labels or None
        text = (lambda x: names[x]) if names else repr
        predictions, targets = self.predictions[split], self.targets(split)
        rows = [f"{i}\t{text(predictions[i])}\t{text(targets[i])}\n" for i in range(len(targets))]
        write_atomically(f"{stem}.tsv", "".join(["index\tprediction\ttarget\n", *rows]))


@dataclass
class GlueCriterionConfig(FairseqDataclass):
    classification_head_name: str = field(
        default="sentence_classification_head", metadata={"help": "name of the classification head"}
    )


@register_criterion("glue", dataclass=GlueCriterionConfig)
class GlueCriterion(FinetuneCriterion):
    """Mean cross-entropy in nats, or mean squared error for a regression. The task computes the scores."""

    def __init__(self, task: GlueTask, classification_head_name: str):
        super().__init__(task)
        self.head = classification_head_name
        self.regression = not task.glue.labels

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        """Returns (summed loss, number of examples, what to log)."""
        options = {"classification_head_name": self.head, "num_tokens": count_tokens(sample)}
        output, _ = model(**sample["net_input"], features_only=True, **options)
        output = output.float()  # [B, K]
        target = sample["target"].view(-1)
        if self.regression:
            output = output.squeeze(1)
            loss, prediction = F.mse_loss(output, target.float(), reduction="sum"), output
        else:
            loss, prediction = F.cross_entropy(output, target, reduction="sum"), output.argmax(dim=1)
        log = {"loss": loss.data, "ntokens": sample["ntokens"], "nsentences": len(target), "sample_size": len(target)}
        if not model.training:
            log.update(split=sample["split"], id=sample["id"].tolist(), prediction=prediction.tolist())
        return loss, len(target), log
