"""Watching a run. It ends with a status of its own when its loss is not finite, when the loss has jumped for good, or
when training stalls. It also estimates the time left.

`ActiveRun` in run.py begins and ends the watch of this process. A loss that is not finite ends every run; the rest is
asked for with --stop-at-jump LOSS and distributed_training.heartbeat_timeout=SECONDS.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from fairseq.trainer import Trainer

from ..common import pace
from ..common.record import STALLED

logger = logging.getLogger(__name__)

IN_A_ROW = 100  # updates: with a loss that has jumped, or skipped
DECAY = 0.99  # of the running mean of the loss


class Watch:
    """timeout: seconds without progress after which the process ends (an update, a batch of validation and a checkpoint
    are progress), 0 for no limit; it counts from the first update. jump: in the unit of the loss, see `follow`; 0 for
    none. updates: of the whole run, 0 if not known. note: called with the reason before the process ends itself.
    reach: called after every update with the number of updates.
    """

    def __init__(
        self, timeout: float, jump: float, updates: int, note: Callable[[str], None],
        reach: Callable[[int], None] = lambda updates: None,
    ):  # fmt: skip
        self.timeout, self.jump, self.updates, self.note, self.reach = timeout, jump, updates, note, reach
        self.mean, self.lowest, self.above, self.skipped = None, math.inf, 0, 0
        self.first = None  # (time, number) of the first update here
        self.moved, self.ended = time.monotonic(), threading.Event()
        self.hosts = []  # of all processes, by rank

    def begin(self, updates: int, processes: int) -> None:
        """Called before the first update. All processes call it."""
        self.first = time.monotonic(), updates
        if processes > 1:
            self.hosts = [None] * processes
            torch.distributed.all_gather_object(self.hosts, socket.gethostname())
        self.move()
        if self.timeout > 0:
            threading.Thread(target=self._wait, daemon=True).start()

    def move(self) -> None:
        """Take note of progress."""
        self.moved = time.monotonic()

    def follow(self, loss: float | None) -> None:
        """Take note of the loss of an update in bits; None if fairseq skipped the update, or nothing was masked.

        Raises FloatingPointError if it is not finite; if `IN_A_ROW` updates in a row were skipped; and if in as many
        the loss was more than `jump` above the lowest running mean since this process began.
        """
        self.move()
        self.skipped = self.skipped + 1 if loss is None else 0
        if self.skipped == IN_A_ROW:
            reasons = "gradients not finite, no memory, or nothing masked"
            raise FloatingPointError(f"{IN_A_ROW} updates in a row were skipped: {reasons}")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        self.mean = loss if self.mean is None else DECAY * self.mean + (1 - DECAY) * loss
        self.lowest = min(self.lowest, self.mean)
        self.above = self.above + 1 if loss > self.lowest + self.jump > self.lowest else 0
        if self.above == IN_A_ROW:
            raise FloatingPointError(
                f"the loss jumped: {IN_A_ROW} updates in a row are more than {self.jump:g} above {self.lowest:.3f}"
            )

    def time_left(self, updates: int) -> str | None:
        """ "hours:minutes:seconds" until the end of the run, at the mean speed of this process so far."""
        if self.first is None or updates <= self.first[1] or not self.updates:
            return None
        speed = (updates - self.first[1]) / (time.monotonic() - self.first[0])
        seconds = round(max(self.updates - updates, 0) / speed)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def end(self) -> None:
        self.ended.set()

    def _wait(self):
        while not self.ended.wait(min(self.timeout / 10, 10)):
            if time.monotonic() - self.moved > self.timeout:
                self._end_process()

    def _end_process(self):
        place = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])[-1]
        reason = f"no progress for {self.timeout:g} s, in {place.name} ({place.filename}:{place.lineno}){waits_for()}"
        logger.error(reason)
        writer = threading.Thread(target=self.note, args=[reason], daemon=True)
        writer.start()
        writer.join(10)  # the disk may be what does not move
        os._exit(STALLED)


_watch = None


def begin(watch: Watch) -> None:
    global _watch
    end()
    _watch = watch


def end() -> None:
    """End the watch of this process, if there is one."""
    if _watch is not None:
        _watch.end()


def waits_for() -> str:
    """For errors of one of several processes: the hosts of the others."""
    if _watch is None or not _watch.hosts:
        return ""
    ranks = [n for n in range(len(_watch.hosts)) if n != torch.distributed.get_rank()]
    return "; the other processes: " + ", ".join(f"rank {n} on {_watch.hosts[n]}" for n in ranks)


def train_step(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    if _watch is None:
        return original(trainer, *args, **kwargs)
    if _watch.first is None:
        _watch.begin(trainer.get_num_updates(), trainer.data_parallel_world_size)
    output = original(trainer, *args, **kwargs)
    _watch.follow(None if output is None else output["loss"])
    _watch.reach(trainer.get_num_updates())
    return output


def valid_step(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    if _watch is not None:
        _watch.move()
    return original(trainer, *args, **kwargs)


def save_checkpoint(trainer: Trainer, *args, original: Callable, **kwargs) -> Any:
    saved = original(trainer, *args, **kwargs)
    if _watch is not None:
        _watch.move()
    return saved


def training_stats(stats: dict, original: Callable) -> dict:
    """What a progress line says, with the time left of this process's run."""
    pace.spoke()
    left = _watch.time_left(stats["num_updates"]) if _watch is not None else None
    return {**original(stats), **({"left": left} if left else {})}
