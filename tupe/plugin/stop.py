"""Stopping on request: a signal makes training finish the update, save a checkpoint without validating, and exit with
`record.STOPPED`. Resuming is exact.

With several processes the request travels with the update: the training time is summed over all processes, and one that
received a signal adds `REQUEST` to its own, so that all stop after the same update. Where the regular course validates
or saves after an update (the end of an epoch, an interval), it does so first: a resumed run would not do it later.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from ..common.record import STOPPED

logger = logging.getLogger(__name__)

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
REQUEST = 1e12  # seconds


class Stop:
    """Whether this process was asked to stop. training: from the first update on; before, a signal ends it at once."""

    def __init__(self):
        self.signal, self.training, self.stopped = None, False, False

    def receive(self, number: int, frame: Any) -> None:
        if not self.training:
            raise SystemExit(STOPPED)
        if self.signal is None:
            logger.warning(f"received {signal.Signals(number).name}: stopping after this update")
        self.signal = number


_stop = None


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, signals stop training as described above, with SystemExit at the end. Signals that are ignored (nohup)
    stay ignored."""
    global _stop
    if threading.current_thread() is not threading.main_thread():  # Python handles signals there alone
        yield
        return
    _stop, previous = Stop(), {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, _stop.receive)
    try:
        yield
        if _stop.stopped:
            raise SystemExit(STOPPED)
    finally:
        _stop = None
        for number, handler in previous.items():
            signal.signal(number, handler)


# A signal for a whole process group (of a terminal, of Slurm) reaches the data workers too, and PyTorch would end
# training at the death of one of them. So they heed their parent alone.
def _shield_child():
    if _stop is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_at_parents_request, args=[os.getppid()], daemon=True).start()


def _end_at_parents_request(parent):
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_shield_child)


def local_training_time(trainer: Trainer, original: Callable) -> float:
    asked = _stop is not None and _stop.signal is not None and trainer.data_parallel_world_size > 1
    return original(trainer) + REQUEST * asked


def train_step(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    if _stop is not None:
        _stop.training = True
    return original(trainer, *args, **kwargs)


def _all_stop(trainer):
    """Whether training stops after this update. Of several processes, all get the same answer."""
    if trainer.data_parallel_world_size == 1:
        return _stop is not None and _stop.signal is not None
    share = REQUEST / trainer.data_parallel_world_size  # of one request in the mean over all processes
    requests = round(float(trainer._cumulative_training_time or 0) / share)
    if requests:
        trainer._cumulative_training_time -= requests * share
    return requests > 0


def is_at(updates: int, interval: int) -> bool:
    """Whether something is done after this update that is done every `interval` updates (0: never)."""
    return interval > 0 and updates % interval == 0


def validate_and_save(
    cfg: DictConfig, trainer: Trainer, task: FairseqTask, epoch_itr: EpochBatchIterator, valid_subsets: list,
    end_of_epoch: bool, *, original: Callable,
) -> tuple[list, bool]:  # fmt: skip
    stops, updates, losses = _all_stop(trainer), trainer.get_num_updates(), [None]
    if not stops:
        return original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    saves = is_at(updates, cfg.checkpoint.save_interval_updates) or 0 < cfg.optimization.max_update <= updates
    saves |= end_of_epoch and epoch_itr.epoch % cfg.checkpoint.save_interval == 0
    if saves or end_of_epoch or is_at(updates, cfg.dataset.validate_interval_updates):
        losses, _ = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    if not saves:
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if trainer.data_parallel_world_size > 1:  # the first to exit would have torchrun end the one that still saves
        torch.distributed.barrier()
    if _stop is not None:
        _stop.stopped = True
    return losses, True
