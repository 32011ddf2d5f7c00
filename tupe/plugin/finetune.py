"""What tasks of fine-tuning share: they start from a pre-trained checkpoint and are scored after every epoch."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig

from ..common.active import is_out_of_memory
from .ordered import OrderedTask
from .pretrained import load_dictionary
from .run import RecordedTask, RecordedTaskConfig

logger = logging.getLogger(__name__)


@dataclass
class FinetuneConfig(RecordedTaskConfig):
    # Taken from another section of the configuration; not an option of its own.
    seed: int = II("common.seed")


class FinetuneTask(OrderedTask, RecordedTask, FairseqTask):
    """Base of tasks that fine-tune a checkpoint and keep its structure.

    It reads the dictionary in `cfg.data` and computes scores over whole splits. A subclass defines `metrics`,
    `evaluate(split) -> {metric: float}` over `predictions`, and `write_predictions(split, stem)`.
    """

    def __init__(self, cfg: DictConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.predictions = {}  # split -> {example id: prediction} of the current validation
        self._scores = {}
        self.shortened = {}  # split -> number of inputs that were cut to the model's length
        self._updates = {}  # split -> number of updates at its last validation

    @classmethod
    def setup_task(cls, cfg: DictConfig, **kwargs) -> "FinetuneTask":
        path = Path(cfg.data) / "dict.txt"
        if not path.exists():
            raise ValueError(f"not found: {path}; data must be a folder that `tupe prepare glue` or `labels` wrote")
        return cls(cfg, load_dictionary(path))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    target_dictionary = source_dictionary

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        self._max_positions = model.max_positions()
        return model

    def note_shortened(self, split: str, count: int, total: int) -> None:
        """Tell the log, and later the record, how many of the inputs of a split were cut to the model's length."""
        if count:
            self.shortened[split] = count
            logger.warning(f"{split}: {count} of {total} inputs were cut to the model's length")

    def max_positions(self) -> int:
        """The model's longest input, special tokens included."""
        return self._max_positions

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if self._training:
            check_end(cfg._get_parent())
        return super().build_criterion(cfg, **kwargs)

    def train_step(self, *args, **kwargs) -> tuple:
        try:
            return super().train_step(*args, **kwargs)
        except RuntimeError as error:
            # fairseq would skip the batch and continue, and the run would have trained less than its record says.
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def begin_valid_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        super().begin_valid_epoch(epoch, model)
        for predictions in self.predictions.values():
            predictions.clear()

    @staticmethod
    def logging_outputs_can_be_summed(criterion: FairseqCriterion) -> bool:
        return criterion.training  # validation outputs hold lists of predictions

    def reduce_metrics(self, logging_outputs: list[dict], criterion: FairseqCriterion) -> None:
        """Gather the predictions of a validation batch: {"split", "id": [...], "prediction": [...]} of each process."""
        super().reduce_metrics(logging_outputs, criterion)
        outputs = [output for output in logging_outputs if "prediction" in output]
        for output in outputs:
            self._split = output["split"]
            predictions = self.predictions.setdefault(self._split, {})
            predictions.update(zip(output["id"], output["prediction"], strict=True))
            self._scores.pop(self._split, None)
        if outputs:
            split = self._split
            for name in self.metrics:
                metrics.log_derived(name, lambda meters, name=name: self.scores(split)[name])
            metrics.log_derived("score", lambda meters: self.scores(split)[self.metrics[0]])

    def complete(self, split: str) -> bool:
        """Whether every example of the split has a prediction."""
        return len(self.predictions[split]) == len(self.dataset(split))

    def scores(self, split: str) -> dict:
        """{metric: value} over the whole split; NaN while predictions are missing."""
        if not self.complete(split):
            return dict.fromkeys(self.metrics, math.nan)
        if split not in self._scores:
            self._scores[split] = self.evaluate(split)
        return self._scores[split]

    def post_validate(self, model: BaseFairseqModel, stats: dict, agg: MetersDict) -> None:
        split = self._split
        if not self.complete(split):
            count, total = len(self.predictions[split]), len(self.dataset(split))
            remedy = "leave max_valid_steps unset, and required_batch_size_multiple at 1"
            raise ValueError(f"only {count} of {total} {split!r} examples were scored: {remedy}")
        # In fp16 fairseq skips every update whose gradients are not finite, so a run that has diverged would never end.
        if not math.isfinite(stats["loss"]) or stats["num_updates"] == self._updates.get(split, 0):
            raise FloatingPointError(f"loss {stats['loss']:g}, {stats['num_updates']} updates so far")
        self._updates[split] = stats["num_updates"]
        if self.run is not None:
            self.run.record.shortened = self.shortened
        super().post_validate(model, stats, agg)

    def keep_predictions(self, split: str, best: bool) -> None:
        folder = self.run.folder / "predictions"
        folder.mkdir(parents=True, exist_ok=True)
        for tag in ["last"] + ["best"] * best:
            self.write_predictions(split, folder / f"{split}_{tag}")


class FinetuneCriterion(FairseqCriterion):
    """Base of the criterions of these tasks. Their loss is a sum over examples, and the task computes the scores."""

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / size, size)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def check_end(config: DictConfig) -> None:
    """Raise ValueError for settings that end fine-tuning before the end of epoch `max_epoch`, or score it within an
    epoch. config: the whole configuration."""
    for section, key in ((config.dataset, "validate_interval_updates"), (config.checkpoint, "save_interval_updates")):
        if section[key] > 0:
            raise ValueError(f"{key}={section[key]}: fine-tuning is scored at the end of each epoch; leave it at 0")
    epochs, every = config.optimization.max_epoch, config.dataset.validate_interval
    if config.dataset.disable_validation or config.dataset.validate_after_updates > 0 or epochs > 0 and epochs % every:
        raise ValueError(
            "disable_validation, validate_after_updates, validate_interval: fine-tuning is scored at the end of each "
            "epoch, or of every nth with a validate_interval that divides max_epoch"
        )
    if getattr(config.optimization, "skip_remainder_batch", False):
        raise ValueError("skip_remainder_batch: fine-tuning trains on all examples of an epoch; leave it out")
    if not config.optimization.max_epoch > 0:
        raise ValueError("fine-tuning needs optimization.max_epoch: a run is finished once that epoch is scored")
    for section, key in (
        (config.optimization, "max_update"), (config.optimization, "stop_time_hours"), (config.checkpoint, "patience"),
    ):  # fmt: skip
        if section[key] > 0:
            raise ValueError(f"{key}={section[key]}: fine-tuning ends with its last epoch; set max_epoch instead")
