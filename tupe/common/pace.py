"""How long a run takes on this machine: said before its first update, after the first few, and whenever nothing else
has been said for a while. A CPU asks before it begins what takes weeks.

Needs torch only where training runs on a GPU.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

FEW = 5  # updates, after which the estimate is a better one
SILENCE = 40  # seconds without a line of progress
LONG = 7 * 24 * 3600  # seconds that a CPU trains without asking
MINUTE, HOUR, DAY, YEAR = 60, 3600, 24 * 3600, 365 * 24 * 3600


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


class Pace:
    """yes: whether a CPU may train as long as it does. updates: of the whole run, 0 if that is not known, None in a
    process that says nothing; cpu: whether it trains there."""

    def __init__(self, yes: bool):
        self.yes, self.updates, self.cpu = yes, None, True
        self.start = self.done = None  # updates: done before the first pass here, and until now
        self.number = self.passes = 0  # of the update that is computed: passes done, and all
        self.since = self.spoke = 0.0
        self.base = 0  # updates done at `since`, where the measurement of `each`, the seconds of an update, begins
        self.each, self.ended = None, threading.Event()

    def expect(self, updates: int, cpu: bool) -> None:
        self.updates, self.cpu, self.spoke = updates, cpu, time.monotonic()
        threading.Thread(target=self._report, daemon=True).start()

    def begin(self, updates: int, passes: int) -> None:
        if self.start is None:
            self.start = updates
        if updates - self.start <= 1:  # the first one here warms up: it does not count
            self.base, self.since = updates, time.monotonic()
        self.done, self.number, self.passes = updates, 0, passes
        if updates - self.start == FEW:
            self.say(f"after {FEW} updates: {self.left()}")

    def passed(self) -> None:
        self.number += 1
        first = self.done == self.start and self.number == 1
        if first and not self.cpu:
            import torch  # only here: see above

            torch.cuda.synchronize()
        self.each = (time.monotonic() - self.since) / (self.done - self.base + self.number / self.passes)
        if not first:
            return
        self.say(f"after the first pass{f' of {self.passes}' * (self.passes > 1)}: {self.left()}")
        seconds = max(self.updates - self.done, 0) * self.each
        if self.cpu and not self.yes and not self.start and seconds > LONG:
            ways = "name fewer (--max-update N), train a small model (--recipe pretrain_small --arch tupe_r_mini)"
            raise ValueError(
                f"{self.updates:,} updates would take about {in_words(seconds)} on this CPU: {ways}, or add --yes"
            )

    def left(self) -> str:
        """The time of an update, and of all that are left."""
        each, left = in_words(self.each), self.updates - self.done
        if not self.updates:
            return f"about {each} an update on this machine"
        most = "about" if self.cpu or self.done > self.start else "at most"
        return f"{each} an update, {most} {in_words(max(left, 0) * self.each)} on this machine for the {left:,} left"

    def say(self, text: str) -> None:
        self.spoke = time.monotonic()
        logger.info(text)

    def state(self) -> str:
        """Where the run stands."""
        if self.start is None:
            return "preparing the first update"
        update = f"update {self.done + 1:,}{f'/{self.updates:,}' * bool(self.updates)}"
        update += f", pass {min(self.number + 1, self.passes)} of {self.passes}" * (self.passes > 1)
        return f"{update}: {self.left()}" if self.each else update

    def _report(self):
        while not self.ended.wait(max(self.spoke + SILENCE - time.monotonic(), 0.1)):
            if time.monotonic() - self.spoke >= SILENCE:
                self.say(self.state())


_pace = None


@contextmanager
def told(yes: bool) -> Iterator[None]:
    """Inside, a training tells how long it takes; see `Pace`."""
    global _pace
    _pace = Pace(yes)
    try:
        yield
    finally:
        _pace.ended.set()
        _pace = None


def expect(updates: int, cpu: bool) -> None:
    """Called before training, in the process that tells."""
    if _pace is not None:
        _pace.expect(updates, cpu)


def begin(updates: int, passes: int) -> None:
    """Called before the first pass of an update. updates: done before it."""
    if _pace is not None and _pace.updates is not None:
        _pace.begin(updates, passes)


def passed() -> None:
    """Called after each pass. Raises ValueError after the first if a CPU would take too long."""
    if _pace is not None and _pace.updates is not None:
        _pace.passed()


def spoke() -> None:
    """A line of progress was printed."""
    if _pace is not None:
        _pace.spoke = time.monotonic()
