"""Stopping on request: a signal makes training drop the update that it is in the middle of, save a checkpoint of the
last whole one without validating, and exit with `record.STOPPED`. Resuming is exact: the dropped batches come again.

fairseq's trainer takes the batches of an update from a list, one before each pass. Here that list ends training.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from ..common import pace, stop
from ..common.record import STOPPED


class Dropped(BaseException):
    """The update that is being computed is not wanted any more. It is no Exception: at those fairseq saves crash.pt."""


class Passes(list):
    """The batches of an update, each for one pass."""

    together = False  # whether each pass needs all processes, not only the last one

    def __iter__(self) -> Iterator[dict]:
        for number, sample in enumerate(self[:], 1):
            if not stop.goes_on(self.together or number == len(self)):
                raise Dropped
            yield sample
            pace.passed()


_dropped = False  # whether the last update was
_position = 0, 0  # (epoch, batches of it) after the last whole update
_saved = None  # the number of updates at the last checkpoint


def train_step(trainer: Trainer, samples: list, *args, original: Callable, **kwargs) -> Any:
    """None for an update that is dropped, as fairseq's own for one without a result."""
    global _dropped
    stop.begin(trainer.get_num_updates())
    pace.begin(trainer.get_num_updates(), len(samples))
    passes = Passes(samples[:])  # those of an update that --amp repeats, too
    passes.together = trainer.is_fsdp
    try:
        return original(trainer, passes, *args, **kwargs)
    except Dropped:
        if stop.is_at_start(trainer.get_num_updates()):
            raise SystemExit(STOPPED) from None
        _dropped = True
        return None


def save_checkpoint(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    global _saved
    saved = original(trainer, *args, **kwargs)
    _saved = trainer.get_num_updates()
    return saved


def validate_and_save(
    cfg: DictConfig, trainer: Trainer, task: FairseqTask, epoch_itr: EpochBatchIterator, valid_subsets: list,
    end_of_epoch: bool, *, original: Callable,
) -> tuple[list, bool]:  # fmt: skip
    global _dropped, _position
    if not _dropped:
        found = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        _position = epoch_itr.epoch, epoch_itr.iterations_in_epoch
        return found
    _dropped = False
    epoch, batches = _position
    epoch_itr._cur_epoch_itr.n = batches if epoch == epoch_itr.epoch else 0
    if _saved != trainer.get_num_updates():
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:  # the first to exit would have torchrun end the one that still saves
        torch.distributed.barrier()
    raise SystemExit(STOPPED)
