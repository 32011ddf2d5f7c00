"""The progress of a run: how long it takes on this machine, whether its losses are sound, and whether it moves at all.
What takes weeks on a CPU is not begun without being asked for."""

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch

from .record import STALLED

logger = logging.getLogger(__name__)

SECONDS_WITHOUT_PROGRESS = 600  # after which processes of several nodes end: one of the nodes may be gone (as for NCCL)
FEW = 5  # updates, after which the estimate is a better one
SILENCE = 40  # seconds without a line of progress
LONG = 7 * 24 * 3600  # seconds that a CPU trains without asking
MINUTE, HOUR, DAY, YEAR = 60, 3600, 24 * 3600, 365 * 24 * 3600
IN_A_ROW = 100  # updates that are skipped


def in_words(seconds: float) -> str:
    """ "42 s"; "3 h 20 min"; "8.8 years" """
    if seconds >= 2 * YEAR:
        return f"{seconds / YEAR:,.1f} years"
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.0f} days"
    for name, size, smaller, part in (("h", HOUR, "min", MINUTE), ("min", MINUTE, "s", 1)):
        if (parts := round(seconds / part)) >= size // part:
            return f"{parts * part // size} {name} {parts % (size // part)} {smaller}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


class Progress:
    """The updates that this process computes, from the first one on.

    updates: of the whole run, 0 if that is not known. cpu: whether it trains there. tells: whether this process says
    how long it takes; yes: however long that is on a CPU. timeout: seconds without progress after which the process
    ends, 0 for no limit; an update, a batch of validation and a checkpoint are progress. note: called with
    the reason before the process ends itself.
    """

    def __init__(
        self, updates: int, cpu: bool, tells: bool = True, yes: bool = False, timeout: float = 0.0,
        note: Callable[[str], None] = lambda reason: None,
    ):  # fmt: skip
        self.updates, self.cpu, self.tells, self.yes = updates, cpu, tells, yes
        self.timeout, self.note = timeout, note
        self.start = self.done = None  # updates: done before the first pass here, and until now
        self.number = self.passes = 0  # of the update that is computed: passes done, and all
        self.base, self.since, self.each = 0, 0.0, None  # the seconds of an update are measured from update `base` on
        self.skipped = 0
        self.said = self.moved = time.monotonic()
        self.ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def end(self) -> None:
        self.ended.set()

    def begin(self, updates: int, passes: int) -> None:
        """Called before the first pass of an update. updates: done before it."""
        if self.start is None:
            self.start, self.moved = updates, time.monotonic()
        if updates - self.start <= 1:  # the first one here warms up: it does not count
            self.base, self.since = updates, time.monotonic()
        self.done, self.number, self.passes = updates, 0, passes
        if self.tells and updates - self.start == FEW:
            self.say(f"after {FEW} updates: {self.left()}")

    def passed(self) -> None:
        """Called after each pass. Raises ValueError after the first if a CPU would take too long."""
        self.number += 1
        first = self.done == self.start and self.number == 1
        if first and not self.cpu:
            torch.cuda.synchronize()
        self.each = (time.monotonic() - self.since) / (self.done - self.base + self.number / self.passes)
        if not first or not self.tells:
            return
        self.say(f"after the first pass{f' of {self.passes}' if self.passes > 1 else ''}: {self.left()}")
        seconds = max(self.updates - self.done, 0) * self.each
        if self.cpu and not self.yes and not self.start and seconds > LONG:
            ways = "name fewer (--max-update N), train a small model (--recipe pretrain_small --arch tupe_r_mini)"
            raise ValueError(
                f"{self.updates:,} updates would take about {in_words(seconds)} on this CPU: {ways}, or add --yes"
            )

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
            reasons = "gradients not finite, no memory, or nothing masked"
            raise FloatingPointError(f"{IN_A_ROW} updates in a row were skipped: {reasons}")
        if loss is not None and not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")

    # ---------------------------------------------------------------------------------------------- what a user is told

    def left(self) -> str:
        """The time of an update, and of all that are left."""
        each, left = in_words(self.each), self.updates - self.done
        if not self.updates:
            return f"about {each} an update on this machine"
        most = "about" if self.cpu or self.done > self.start else "at most"
        return f"{each} an update, {most} {in_words(max(left, 0) * self.each)} on this machine for the {left:,} left"

    def time_left(self, updates: int) -> str | None:
        """ "hours:minutes:seconds" from update `updates` to the end of the run; None if that is not known."""
        if not self.updates or not self.each:
            return None
        seconds = round(max(self.updates - updates, 0) * self.each)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def say(self, text: str) -> None:
        self.spoke()
        logger.info(text)

    def spoke(self) -> None:
        """A line of progress was printed."""
        self.said = time.monotonic()

    def state(self) -> str:
        """Where the run stands."""
        if self.start is None:
            return "preparing the first update"
        update = f"update {self.done + 1:,}{f'/{self.updates:,}' if self.updates else ''}"
        update += f", pass {min(self.number + 1, self.passes)} of {self.passes}" if self.passes > 1 else ""
        return f"{update}: {self.left()}" if self.each else update

    # --------------------------------------------------------------------------------------------------- in a thread

    def _look(self):
        while not self.ended.wait(seconds_between_looks(self.timeout)):
            now = time.monotonic()
            if self.tells and now - self.said >= SILENCE:
                self.say(self.state())
            if self.start is not None and 0 < self.timeout < now - self.moved:
                self._end_process()

    def _end_process(self):
        place = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])[-1]
        reason = f"no progress for {self.timeout:g} s, in {place.name} ({place.filename}:{place.lineno})"
        logger.error(reason)
        writer = threading.Thread(target=self.note, args=[reason], daemon=True)
        writer.start()
        writer.join(10)  # the disk may be what does not move
        os._exit(STALLED)


def seconds_between_looks(timeout: float) -> float:
    """Never 0: a thread that does not sleep takes the time of the training beside it. timeout: 0 or less for none."""
    return min(SILENCE / 4, 10, timeout / 10 if timeout > 0 else 10)
