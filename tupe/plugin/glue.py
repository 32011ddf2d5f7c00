"""A fairseq task and criterion for GLUE, whose tasks and scores are in `tupe.data.glue`.

B batch, L length of a pair of sentences with its special tokens, K classes (1 for a regression).
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqDataclass, register_task
from omegaconf import II, MISSING, DictConfig

from ..common.options import shorten_list
from ..data import examples
from ..data.batches import Epoch
from ..data.glue import TASKS, glue_name, own_task, read_targets, score, write_predictions
from .criterion import count_tokens
from .finetune import FinetuneConfig, FinetuneCriterion, FinetuneTask
from .ordered import Items


@dataclass
class GlueConfig(FinetuneConfig):
    data: str = field(default=MISSING, metadata={"help": "folder that `tupe prepare glue` or `labels` wrote"})
    glue_task: str = field(default=MISSING, metadata={"help": f"{', '.join(TASKS)}, or one of `tupe prepare labels`"})
    classification_head_name: str = II("criterion.classification_head_name")


def collate(split: str, samples: list) -> dict:
    """A batch of fairseq's task: source [B, L], padded on the right. samples: (index, example)."""
    batch = examples.collate([example for _, example in samples])
    lengths = torch.tensor([len(tokens) for _, (_, tokens, _) in samples])
    batch = {
        "id": torch.tensor(batch["rows"]), "split": split,
        "net_input": {"src_tokens": batch["input_ids"], "src_lengths": lengths},
        "nsentences": len(samples), "ntokens": batch["num_tokens"], "target": batch["labels"],
    }  # fmt: skip
    if not len(batch["target"]):  # of a test set
        del batch["target"]
    return batch


@register_task("glue", dataclass=GlueConfig)
class GlueTask(FinetuneTask):
    """Classification or regression of one sentence or two; `TASKS` has everything that depends on the dataset."""

    def __init__(self, cfg: DictConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.name, self.glue = cfg.glue_task, None
        try:
            self.name = glue_name(cfg.glue_task, cfg.data)
            self.glue = TASKS[self.name]
        except ValueError as error:  # a checkpoint says what it is: `load_state_dict`
            self.unknown = error
        self.targets = functools.partial(functools.cache(read_targets), Path(cfg.data, self.name))

    @property
    def metrics(self) -> tuple:
        return self.glue.metrics

    @property
    def layout(self) -> dict | None:
        return self.glue.plain()

    def state_dict(self) -> dict:
        """Into the checkpoint: what the outputs of the head stand for."""
        labels = {self.cfg.classification_head_name: list(self.glue.names)}
        return {**super().state_dict(), "labels": labels, "layout": self.layout}

    def load_state_dict(self, state_dict: dict) -> None:
        """Raises ValueError if the labels of the data are not those of the checkpoint, in its order, or its range."""
        state_dict = dict(state_dict)
        labels, layout = state_dict.pop("labels", {}), state_dict.pop("layout", None)
        if self.glue is None and layout:
            self.glue = TASKS[self.name] = own_task(layout)
        if self.glue is None:
            raise self.unknown
        theirs = labels.get(self.cfg.classification_head_name, self.glue.names)
        if [*theirs] != [*self.glue.names]:
            ours, theirs = shorten_list(self.glue.names), shorten_list(theirs)
            raise ValueError(f"{self.name}: the labels are {theirs} in the checkpoint, {ours} in the data")
        self.glue.check_range(layout and own_task(layout).range, self.name, "the checkpoint")
        super().load_state_dict(state_dict)

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        if self.glue is None:
            raise self.unknown
        model = super().build_model(cfg, from_checkpoint)
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.glue.outputs)
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        found = examples.Examples(Path(self.cfg.data, self.name), split, self.max_positions())
        batches = functools.partial(Epoch, len(found), self.cfg.seed) if split == "train" else found.longest_first
        self.datasets[split] = Items(found, functools.partial(collate, split), batches, int(found.sizes.max()))
        self.note_shortened(split, found.shortened, len(found))

    def evaluate(self, split: str) -> dict:
        predictions = self.predictions[split]
        return score(self.metrics, [predictions[i] for i in range(len(predictions))], self.targets(split))

    def record_name(self, config: DictConfig) -> str:
        return self.name

    def data_files(self, split: str) -> list[Path]:
        return sorted(Path(self.cfg.data, self.name).glob(f"*/{split}.*"))

    def write_predictions(self, split: str, stem: str | Path) -> None:
        write_predictions(self.glue, self.predictions[split], self.targets(split), f"{stem}.tsv")


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
