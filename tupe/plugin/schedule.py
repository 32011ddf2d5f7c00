"""Learning-rate schedules: one whose warm-up is a share of the run, and one that is constant up to a final cool-down;
and the number of updates of a run."""

import math
from dataclasses import dataclass, field
from typing import List  # noqa: UP035

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig

from ..common.rates import check_constant, constant

SCHEDULE = "polynomial_decay_ratio"


@dataclass
class PolynomialDecayRatioConfig(PolynomialDecayLRScheduleConfig):
    warmup_ratio: float = field(default=0.06, metadata={"help": "share of all updates with a rising learning rate"})
    total_num_update: float = field(
        default=0, metadata={"help": "number of updates; 0: the tasks of this plugin compute it from max_epoch"}
    )


@register_lr_scheduler(SCHEDULE, dataclass=PolynomialDecayRatioConfig)
class PolynomialDecayRatio(PolynomialDecayLRSchedule):
    """Linear warm-up over `warmup_ratio` of the updates, then polynomial (by default linear) decay to the end value.

    fairseq's own schedule needs numbers of updates, which differ between data sets.

    Raises ValueError without a number of updates, and for more than one rate.
    """

    def __init__(self, cfg: "PolynomialDecayRatioConfig", optimizer: FairseqOptimizer):
        check_one_rate(SCHEDULE, cfg.lr)
        if not cfg.total_num_update > 0:
            raise ValueError(f"{SCHEDULE} needs total_num_update, or max_epoch and a task of this plugin")
        cfg.warmup_updates = round(cfg.warmup_ratio * cfg.total_num_update)
        super().__init__(cfg, optimizer)


@dataclass
class ConstantCooldownConfig(FairseqDataclass):
    warmup_updates: int = field(default=0, metadata={"help": "updates with a rising learning rate"})
    cooldown_updates: int = field(default=0, metadata={"help": "last updates, with a rate that falls to 0; 0: none"})
    total_num_update: int = field(default=II("optimization.max_update"), metadata={"help": "number of all updates"})
    lr: List[float] = II("optimization.lr")  # noqa: UP006  (fairseq reads this spelling)


@register_lr_scheduler("constant_cooldown", dataclass=ConstantCooldownConfig)
class ConstantCooldown(FairseqLRScheduler):
    """Linear warm-up, a constant rate, and a linear cool-down to 0 (Hägele et al., 2024).

    Until the cool-down begins, the rate does not depend on the length of the run. So one run serves several lengths: a
    shorter one continues a checkpoint of the longer one from the update at which its own cool-down begins.

    Raises ValueError for a warm-up and a cool-down that are longer than the run together, and for more than one rate.
    """

    def __init__(self, cfg: "ConstantCooldownConfig", optimizer: FairseqOptimizer):
        check_one_rate("constant_cooldown", cfg.lr)
        super().__init__(cfg, optimizer)
        check_constant(cfg.warmup_updates, cfg.cooldown_updates, cfg.total_num_update)
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set and return the rate of the update after `num_updates` updates (of the first one: as of the second)."""
        cfg = self.cfg
        factor = constant(num_updates, cfg.warmup_updates, cfg.cooldown_updates, cfg.total_num_update)
        self.optimizer.set_lr(factor * cfg.lr[0])
        return self.optimizer.get_lr()


def check_one_rate(schedule: str, rates: list[float]) -> None:
    if len(rates) > 1:
        raise ValueError(f"--lr {','.join(f'{rate:g}' for rate in rates)}: {schedule} has one rate for all epochs")


def count_updates(task: FairseqTask, config: DictConfig) -> int:
    """Updates in `max_epoch` epochs, or `max_update` if that is less or there is no other; 0 without either. task: one
    whose data sets are `ordered.Items`; config: the whole one."""
    data, most = config.dataset, max(config.optimization.max_update, 0)
    if not config.optimization.max_epoch > 0:
        return most
    task.load_dataset(data.train_subset, combine=True)
    items = task.dataset(data.train_subset)
    sequences = items.batch_size(data.batch_size, data.max_tokens)
    batches = math.ceil(len(items) / (sequences * config.distributed_training.distributed_world_size))
    freq = config.optimization.update_freq  # of each epoch; the last one is that of all that follow
    epochs = range(config.optimization.max_epoch)
    updates = sum(math.ceil(batches / freq[min(epoch, len(freq) - 1)]) for epoch in epochs)
    return min(updates, most) if most > 0 else updates
