"""What this package adds to the steps of fairseq's trainer and of its loop.

A signal makes training drop the update that it is in the middle of, save a checkpoint of the last whole one without
validating, and exit with `record.STOPPED`. Resuming is exact: the dropped batches come again. fairseq's trainer takes
the batches of an update from a list, one before each pass; here that list ends training.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from ..run import stop
from ..run.record import STOPPED
from . import recorded


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
            if active := recorded.active():
                active.progress.passed()


_dropped = False  # whether the last update was
_position = 0, 0  # (epoch, batches of it) after the last whole update


def train_step(trainer: Trainer, samples: list, raise_oom: bool = True, *, original: Callable) -> Any:
    """None for an update that is dropped, as fairseq's own for one without a result.

    fairseq fills up a process that has fewer batches than others at the end of an epoch with empty ones: where one
    comes last, it would count the process's whole update as nothing, but for its gradients."""
    global _dropped
    active = recorded.active()
    stop.begin(trainer.get_num_updates())
    passes = Passes([sample for sample in samples if sample] or samples[:1])
    if active:
        active.progress.begin(trainer.get_num_updates(), len(passes))
    passes.together = trainer.is_fsdp
    try:
        # Else fairseq would leave out a batch for which there is no memory: less than the record says.
        output = original(trainer, passes, raise_oom=True)
    except Dropped:
        if stop.is_at_start(trainer.get_num_updates()):
            raise SystemExit(STOPPED) from None
        _dropped = True
        return None
    if active:
        active.progress.follow(None if output is None else output["loss"])
        active.reach(trainer.get_num_updates())
    return output


def with_progress(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    """A step of the trainer that takes a while: the process does not hang."""
    done = original(trainer, *args, **kwargs)
    if active := recorded.active():
        active.progress.move()
    return done


def validate(cfg: DictConfig, *args, original: Callable) -> list:
    """fairseq's, on `max_valid_steps` batches: its own takes one more."""
    most = cfg.dataset.max_valid_steps
    cfg.dataset.max_valid_steps = most - 1 if most else None
    try:
        return original(cfg, *args)
    finally:
        cfg.dataset.max_valid_steps = most


def training_stats(stats: dict, original: Callable) -> dict:
    """What a progress line says, with the time left of this process's run."""
    left = None
    if active := recorded.active():
        active.progress.spoke()
        left = active.progress.time_left(stats["num_updates"])
    return {**original(stats), **({"left": left} if left else {})}


def validate_and_save(
    cfg: DictConfig, trainer: Trainer, task: FairseqTask, epoch_itr: EpochBatchIterator, valid_subsets: list,
    end_of_epoch: bool, *, original: Callable,
) -> tuple[list, bool]:  # fmt: skip
    """fairseq's; after an update that was dropped, all processes save the last whole one and exit."""
    global _dropped, _position
    if not _dropped:
        found = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        _position = epoch_itr.epoch, epoch_itr.iterations_in_epoch
        return found
    _dropped = False
    epoch, batches = _position
    epoch_itr._cur_epoch_itr.n = batches if epoch == epoch_itr.epoch else 0
    checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:  # the first to exit would have torchrun end the one that still saves
        torch.distributed.barrier()
    raise SystemExit(STOPPED)
