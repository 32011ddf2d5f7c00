"""Fine-tuning as a fairseq task and criterion: classes or numbers of one sentence or two, from a pre-trained checkpoint
whose structure it keeps. `tupe.data.glue` has the tasks and their scores, of GLUE and of one's own.

B batch, L length of a pair of sentences with its special tokens, K classes (1 for a regression).
"""

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING, DictConfig

from ..checkpoints.trained import CLASSIFIER
from ..data import examples
from ..data.batches import Epoch
from ..data.glue import TASKS, glue_name, read_targets, score, write_predictions
from .ordered import Items
from .pretrained import load_dictionary
from .recorded import RecordedTask, RecordedTaskConfig


@dataclass
class GlueConfig(RecordedTaskConfig):
    data: str = field(default=MISSING, metadata={"help": "folder that `tupe prepare glue` or `labels` wrote"})
    glue_task: str = field(default=MISSING, metadata={"help": f"{', '.join(TASKS)}, or one of `tupe prepare labels`"})
    classification_head_name: str = field(default=CLASSIFIER, metadata={"help": "what the head is called"})
    seed: int = II("common.seed")  # taken from another section of the configuration, not an option of its own


@register_task("glue", dataclass=GlueConfig)
class GlueTask(RecordedTask, FairseqTask):
    """Classification or regression of one sentence or two; `TASKS` has everything that depends on the dataset. Every
    split is scored as a whole at the end of every epoch."""

    def __init__(self, cfg: DictConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.name = glue_name(cfg.glue_task, cfg.data)
        self.glue = TASKS[self.name]
        self.metrics, self.layout = self.glue.metrics, self.glue.plain()
        self.targets = functools.partial(functools.cache(read_targets), Path(cfg.data, self.name))
        self.predictions = defaultdict(dict)  # split -> {number of an example: prediction} of the current validation

    @classmethod
    def setup_task(cls, cfg: DictConfig, **kwargs) -> "GlueTask":
        return cls(cfg, load_dictionary(Path(cfg.data, "dict.txt")))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    target_dictionary = source_dictionary

    def max_positions(self) -> int:
        """The model's longest input, special tokens included."""
        return self._max_positions

    # ---- what training begins with ----

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        self._max_positions = model.max_positions()
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.glue.outputs)
        return model

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if self._training:
            config = cfg._get_parent()
            self.train_subset = config.dataset.train_subset
            for split in (config.dataset.train_subset, *config.dataset.valid_subset.split(",")):
                self.load_dataset(split)
                self.dataset(split).batch_size(None, config.dataset.max_tokens)  # raises ValueError for too few
        return super().build_criterion(cfg, **kwargs)

    def record_name(self, config: DictConfig) -> str:
        return self.name

    def data_files(self, split: str) -> list[Path]:
        return sorted(Path(self.cfg.data, self.name).glob(f"*/{split}.*"))

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        if split in self.datasets:
            return
        found = examples.Examples(Path(self.cfg.data, self.name), split, self.max_positions())
        trains = split == self.train_subset
        batches = functools.partial(Epoch, len(found), self.cfg.seed) if trains else found.longest_first
        self.datasets[split] = Items(found, functools.partial(collate, split), batches, int(found.sizes.max()))

    def state_dict(self) -> dict:
        """Into the checkpoint: what the outputs of the head stand for."""
        labels = {self.cfg.classification_head_name: list(self.glue.names)}
        return {**super().state_dict(), "labels": labels, "layout": self.layout}

    # ---- training and scores ----

    @staticmethod
    def logging_outputs_can_be_summed(criterion: FairseqCriterion) -> bool:
        return criterion.training  # validation outputs hold lists of predictions

    def begin_valid_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        super().begin_valid_epoch(epoch, model)
        self.predictions.clear()

    def reduce_metrics(self, logging_outputs: list[dict], criterion: FairseqCriterion) -> None:
        """Gather the predictions of a validation batch: {"split", "id": [...], "prediction": [...]} of each process."""
        super().reduce_metrics(logging_outputs, criterion)
        outputs = [output for output in logging_outputs if "prediction" in output]
        for output in outputs:
            self._split = output["split"]
            self.predictions[self._split].update(zip(output["id"], output["prediction"], strict=True))
        if outputs:
            for name in ("score", *self.metrics):
                metrics.log_derived(name, lambda meters, split=self._split, name=name: self.scores(split)[name])

    def scores(self, split: str) -> dict:
        """{metric: value} over the whole split, the first metric also as "score"; NaN while predictions are missing."""
        predictions, targets = self.predictions[split], self.targets(split)
        if len(predictions) < len(targets):
            return dict.fromkeys(("score", *self.metrics), math.nan)
        found = score(self.metrics, [predictions[i] for i in range(len(targets))], targets)
        return {"score": found[self.metrics[0]], **found}

    def keep_predictions(self, split: str, best: bool) -> None:
        write_predictions(self.glue, self.predictions[split], self.targets(split), self.run.folder, split, best)


def collate(split: str, samples: list) -> dict:
    """A batch of fairseq's task: source [B, L], padded on the right. samples: (index, example)."""
    batch = examples.collate([example for _, example in samples])
    lengths = torch.tensor([len(tokens) for _, (_, tokens, _) in samples])
    labels = batch["labels"]
    labels = labels.double() if labels.is_floating_point() else labels  # with --fp16 fairseq would round float32
    batch = {
        "id": torch.tensor(batch["rows"]), "split": split,
        "net_input": {"src_tokens": batch["input_ids"], "src_lengths": lengths},
        "nsentences": len(samples), "ntokens": batch["num_tokens"], "target": labels,
    }  # fmt: skip
    if not len(batch["target"]):  # of a test set
        del batch["target"]
    return batch


@register_criterion("glue", dataclass=FairseqDataclass)
class GlueCriterion(FairseqCriterion):
    """Mean cross-entropy in nats, or mean squared error for a regression. The task computes the scores."""

    def __init__(self, task: GlueTask):
        super().__init__(task)
        self.head = task.cfg.classification_head_name
        self.regression = not task.glue.labels

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        """Returns (summed loss, number of examples, what to log)."""
        options = {"classification_head_name": self.head, "num_tokens": int(sample["ntokens"])}
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

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / size, size)
