"""The progress of a run: how long it takes on this machine, whether its losses are sound, and whether it moves."""

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

from .record import STALLED

logger = logging.getLogger(__name__)

SECONDS_WITHOUT_PROGRESS = 600  # after which processes of several nodes end: one of the nodes may be gone (as for NCCL)
FEW = 5  # updates, after which the estimate is a better one
IN_A_ROW = 100  # updates that are skipped


class Progress:
    """The updates that this process computes, from the first one on.

    updates: of the whole run, 0 if that is not known. tells: whether this process says how long it takes. timeout:
    seconds without progress after which the process ends, 0 or less for no limit; an update, a batch of validation and
    a checkpoint are progress. note: called with the reason before the process ends itself.
    """

    def __init__(
        self, updates: int, tells: bool = True, timeout: float = 0.0,
        note: Callable[[str], None] = lambda reason: None,
    ):  # fmt: skip
        self.updates, self.tells, self.timeout, self.note = updates, tells, timeout, note
        self.start = self.base = self.since = None  # updates before the first one here; from where `each` is measured
        self.each = None  # seconds of an update
        self.skipped = 0
        self.moved = time.monotonic()
        self.ended = threading.Event()
        if timeout > 0:
            threading.Thread(target=self._look, daemon=True).start()

    def end(self) -> None:
        self.ended.set()

    def begin(self, updates: int) -> None:
        """Called before an update. updates: done before it."""
        now = time.monotonic()
        if self.start is None:
            self.start = self.base = updates
            self.since = self.moved = now
        done = updates - self.start
        if updates > self.base:  # else the last one was skipped
            self.each = (now - self.since) / (updates - self.base)
            if self.tells and done in (1, FEW):
                left = self.time_left(updates)
                left = f", about {left} on this machine for the {self.updates - updates:,} left" if left else ""
                logger.info(f"after {done} update{'s' if done > 1 else ''}: {self.each:.2g} s an update{left}")
        if done == 1:  # the first one here warms up: it does not count any more
            self.base, self.since = updates, now

    def move(self) -> None:
        """Take note of progress."""
        self.moved = time.monotonic()

    def follow(self, loss: float | None) -> None:
        """Take note of the loss of an update; None if the update was skipped, or nothing was masked.

        Raises FloatingPointError if it is not finite, and if `IN_A_ROW` updates in a row were skipped.
        """
        self.move()
        self.skipped = self.skipped + 1 if loss is None else 0
        if self.skipped == IN_A_ROW:
            reasons = "gradients not finite, or nothing masked"
            raise FloatingPointError(f"{IN_A_ROW} updates in a row were skipped: {reasons}")
        if loss is not None and not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")

    def time_left(self, updates: int) -> str | None:
        """From update `updates` to the end of the run, "3:20:00" or "2 days, 1:00:00"; None if that is not known."""
        if not self.updates or not self.each:
            return None
        return str(timedelta(seconds=round(max(self.updates - updates, 0) * self.each)))

    def _look(self):
        while not self.ended.wait(min(10, self.timeout / 10)):
            if self.start is not None and time.monotonic() - self.moved > self.timeout:
                self._end_process()

    def _end_process(self):
        place = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])[-1]
        reason = f"no progress for {self.timeout:g} s, in {place.name} ({place.filename}:{place.lineno})"
        logger.error(reason)
        writer = threading.Thread(target=self.note, args=[reason], daemon=True)
        writer.start()
        writer.join(10)  # the disk may be what does not move
        os._exit(STALLED)
