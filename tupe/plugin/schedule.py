"""The learning-rate schedule that is given as a ratio of the run, and how many updates a run has."""

import math
from dataclasses import dataclass, field

from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

SCHEDULE = "polynomial_decay_ratio"


@dataclass
class PolynomialDecayRatioConfig(PolynomialDecayLRScheduleConfig):
    warmup_ratio: float = field(default=0.06, metadata={"help": "share of all updates with a growing learning rate"})
    total_num_update: float = field(
        default=0, metadata={"help": "number of updates; 0: the tasks of this plugin work it out from max_epoch"}
    )


@register_lr_scheduler(SCHEDULE, dataclass=PolynomialDecayRatioConfig)
class PolynomialDecayRatio(PolynomialDecayLRSchedule):
    """Linear warm-up over `warmup_ratio` of the updates, then polynomial (by default linear) decay to the end value.

    fairseq's own schedule wants both as numbers of updates, which differ from data set to data set.
    """

    def __init__(self, cfg, optimizer):
        if not cfg.total_num_update > 0:
            raise ValueError(f"{SCHEDULE} needs total_num_update, or max_epoch and a task of this plugin")
        if not 0 <= cfg.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio must be in [0, 1), got {cfg.warmup_ratio}")
        if cfg.warmup_updates:
            raise ValueError(f"{SCHEDULE} takes warmup_ratio, not warmup_updates")
        cfg.warmup_updates = round(cfg.warmup_ratio * cfg.total_num_update)
        super().__init__(cfg, optimizer)


def count_updates(task: FairseqTask, config: DictConfig) -> int:
    """Updates of `max_epoch` epochs, counted on the batches that fairseq will make. config: the whole configuration."""
    data, epochs = config.dataset, config.optimization.max_epoch
    task.load_dataset(data.train_subset)
    batches = task.get_batch_iterator(
        task.dataset(data.train_subset),
        max_tokens=data.max_tokens,
        max_sentences=data.batch_size,
        max_positions=task.max_positions(),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=data.required_batch_size_multiple,
        seed=config.common.seed,
        num_shards=config.distributed_training.distributed_world_size,
        disable_iterator_cache=True,
    )
    freq = config.optimization.update_freq
    return sum(math.ceil(len(batches) / freq[min(epoch, len(freq) - 1)]) for epoch in range(epochs))
