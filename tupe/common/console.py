"""What a command that trains says: the whole log goes to RUN/train.log, and a few lines of it to the console."""

import json
import logging
import os
import re
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import record as records

NAME = "train.log"
FORMAT = logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S")
LONGEST = 200  # characters of a line of the console; a longer one is for the log
FIRST, SECONDS = 5, 10  # so many lines of progress are shown at once, the others when so many seconds have passed
# Of fairseq's statistics, those that are no scores.
COUNTS = {"epoch", "update", "wps", "ups", "wpb", "bsz", "num_updates", "lr", "gnorm", "clip", "loss_scale", "wall",
          "train_wall", "gb_free", "left", "ppl", "best_loss"}  # fmt: skip


logger = logging.getLogger(__name__)


class Whole(logging.Handler):
    """Everything, into the log of the run that this process has locked. Until it has one the records wait: a start that
    is refused leaves nothing behind."""

    def __init__(self):
        super().__init__()
        self.setFormatter(FORMAT)
        self.others = records.held()  # locked before: not of this run
        self.waiting, self.file, self.path = deque(maxlen=1000), None, None

    def emit(self, record: logging.LogRecord) -> None:
        self.waiting.append(self.format(record))
        self.write()

    def write(self) -> None:
        if self.file is None:
            folder = next((folder for folder in records.held() if folder not in self.others), None)
            if folder is None:
                return
            with suppress(OSError):  # of a disk that is full or read-only, which training itself will meet
                self.path = folder / NAME
                self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
                if not is_output(self.path):
                    self.file.write(f"$ {records.command_line()}\n")
                    logger.info(f"the whole log is in {self.path}")
        with suppress(OSError):
            while self.file is not None and self.waiting:
                self.file.write(self.waiting[0] + "\n")
                self.file.flush()
                self.waiting.popleft()

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
        super().close()


class Console(logging.Handler):
    """Warnings, what this package says in short, and progress: every line of the first few, then one now and then."""

    def __init__(self, whole: Whole):
        super().__init__()
        self.whole, self.shown, self.last = whole, 0, 0.0
        self.into_log = (
            Path(os.path.realpath("/proc/self/fd/1")).name == NAME
        )  # in a sweep: that of the run, see `hides`

    def hides(self) -> bool:
        """Whether the output goes to the run's log, which has it all, or surely will."""
        return self.into_log and (self.whole.path is None or is_output(self.whole.path))

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self.hides():
            return
        if (line := progress(record.name, message)) is not None:
            if self.shown >= FIRST and time.monotonic() - self.last < SECONDS:
                return
            self.shown, self.last, message = self.shown + 1, time.monotonic(), line
        elif (line := scores(record.name, message)) is not None:
            message = line
        elif record.levelno < logging.WARNING and not is_short(record.name, message):
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError):  # of a pipe that nobody reads
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {level}{message}\n")
            sys.stdout.flush()


def is_short(name: str, message: str) -> bool:
    """Whether the console shows it: one line of this package, or one of fairseq's that tells where a run stands."""
    shown = name.startswith("tupe.") or message.startswith(("done training", "Loaded checkpoint"))
    return shown and len(message) <= LONGEST and "\n" not in message


def statistics(message: str) -> dict[str, str]:
    """{name: value} of a line of fairseq's, in either of its formats."""
    with suppress(ValueError):
        return {str(name): str(value) for name, value in json.loads(message).items()}
    return dict(re.findall(r"([\w/]+)(?:=| )([^\s,|=]+)(?:,|$| \|)", message))


def progress(name: str, message: str) -> str | None:
    """A line of progress, of either engine; None for what is none."""
    if name == "tupe.train":
        return message if re.match(r"update \d+/.* left$", message) else None
    if name != "train_inner":
        return None
    said = statistics(message)
    number, left = said.get("num_updates", "?"), said.get("left")
    loss, gradient, rate = said.get("loss", "?"), said.get("gnorm", "?"), said.get("lr", "?")
    line = f"update {number}: loss {loss}, gradient norm {gradient}, lr {rate}, {said.get('ups', '?')} updates/s"
    return line + (f", {left} left" if left else "")


def scores(name: str, message: str) -> str | None:
    """A line with the scores of a validation of fairseq's, which names the split as its logger; None for others."""
    if not name.startswith("valid"):
        return None
    numbers = {key.removeprefix(f"{name}_"): value for key, value in statistics(message).items()}
    if "num_updates" not in numbers:
        return None
    kept = ", ".join(f"{key} {value}" for key, value in numbers.items() if key not in COUNTS)
    return f"update {numbers['num_updates']}: {kept} on {name!r}"


def is_output(path: Path) -> bool:
    """Whether this process's output already goes to a file, as in a sweep."""
    with suppress(OSError, ValueError):
        return os.path.samestat(os.fstat(1), path.stat())
    return False


_whole = None


@contextmanager
def logged() -> Iterator[None]:
    """Inside, the log goes where this module says. What libraries set up for the root logger is put aside meanwhile."""
    global _whole
    if _whole is not None:  # the command that started this one does it
        yield
        return
    root = logging.getLogger()
    theirs = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    level, _whole = root.level, Whole()
    handlers = (_whole, Console(_whole))
    for handler in theirs:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        for handler in theirs:
            root.addHandler(handler)
        _whole = None


def keep_traceback() -> str:
    """Write the traceback of the exception that is handled into the log, and return the end of an error's line that
    says where; without a log, print it."""
    if _whole is None or _whole.file is None:
        traceback.print_exc()
        return ""
    _whole.waiting.append(traceback.format_exc().rstrip())
    _whole.write()
    return f"; see {_whole.path}"
