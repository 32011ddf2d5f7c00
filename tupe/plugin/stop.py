"""Stopping on request: a signal makes training finish the update, save a checkpoint without validating, and exit with
`record.STOPPED`. Resuming is exact.

With several processes the request travels with the update: the training time is summed over all processes, and one that
received a signal adds `REQUEST` to its own, so that all stop after the same update. Where the regular course validates
or saves after an update (the end of an epoch, an interval), it does so first: a resumed run would not do it later.
"""

from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from ..common import stop

REQUEST = 1e12  # seconds


def local_training_time(trainer: Trainer, original: Callable) -> float:
    asked = stop.asked() and trainer.data_parallel_world_size > 1
    return original(trainer) + REQUEST * asked


def train_step(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    stop.begin()
    return original(trainer, *args, **kwargs)


def _all_stop(trainer):
    """Whether training stops after this update. Of several processes, all get the same answer."""
    if trainer.data_parallel_world_size == 1:
        return stop.asked()
    share = REQUEST / trainer.data_parallel_world_size  # of one request in the mean over all processes
    requests = round(float(trainer._cumulative_training_time or 0) / share)
    if requests:
        trainer._cumulative_training_time -= requests * share
    return requests > 0


def validate_and_save(
    cfg: DictConfig, trainer: Trainer, task: FairseqTask, epoch_itr: EpochBatchIterator, valid_subsets: list,
    end_of_epoch: bool, *, original: Callable,
) -> tuple[list, bool]:  # fmt: skip
    stops, updates, losses = _all_stop(trainer), trainer.get_num_updates(), [None]
    if not stops:
        return original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    saves = stop.is_at(updates, cfg.checkpoint.save_interval_updates) or 0 < cfg.optimization.max_update <= updates
    saves |= end_of_epoch and epoch_itr.epoch % cfg.checkpoint.save_interval == 0
    if saves or end_of_epoch or stop.is_at(updates, cfg.dataset.validate_interval_updates):
        losses, _ = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    if not saves:
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:  # the first to exit would have torchrun end the one that still saves
        torch.distributed.barrier()
    stop.end()
    return losses, True
