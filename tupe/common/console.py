"""What a command that trains says: the whole log goes to RUN/train.log, and a few lines of it to the console."""

import logging
import logging.handlers
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..run import record as records
from ..run.folder import held

NAME, STDOUT = "train.log", "/proc/self/fd/1"
FORMAT = logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S")
LONGEST = 200  # characters of a line of the console; a longer one is for the log
FIRST, SECONDS = 5, 10  # so many lines of progress are shown at once, the others when so many seconds have passed

logger = logging.getLogger(__name__)


class File(logging.FileHandler):
    """A log whose write errors are ignored: a full disk will stop training itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class Log(logging.handlers.MemoryHandler):
    """Everything, into the log of the run that this process has locked. Until it has one the records wait: a start that
    is refused leaves nothing behind."""

    def __init__(self):
        super().__init__(capacity=1)
        self.others = held()  # locked before: not of this run

    def flush(self) -> None:
        folder = next((folder for folder in held() if folder not in self.others), None)
        if self.target is None and folder is not None:
            file = File(folder / NAME, encoding="utf-8", errors="backslashreplace", delay=True)
            file.setFormatter(FORMAT)
            self.setTarget(file)
            if not is_into_log(folder):
                with suppress(OSError):
                    file.stream = file._open()
                    file.stream.write(f"$ {records.command_line()}\n")
                logger.info(f"the whole log is in {file.baseFilename}")
        super().flush()

    def close(self) -> None:
        if self.target is not None:
            self.target.close()
        super().close()


class Console(logging.Handler):
    """Warnings, what this package says in short, and progress: every line of the first few, then one now and then."""

    def __init__(self):
        super().__init__()
        self.shown, self.last = 0, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if is_progress(record.name, message):
            if self.shown >= FIRST and time.monotonic() - self.last < SECONDS:
                return
            self.shown, self.last = self.shown + 1, time.monotonic()
        elif record.levelno < logging.WARNING and not is_short(record.name, message):
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError):  # of a pipe that nobody reads
            print(f"{time.strftime('%H:%M:%S')} {level}{message}", flush=True)


def is_into_log(folder: Path) -> bool:
    """Whether the output of this process is the run's log, as in a sweep: nothing is to stand there twice."""
    return os.path.realpath(STDOUT) == os.path.realpath(folder / NAME)


def is_short(name: str, message: str) -> bool:
    """Whether the console shows it: one line of this package, or one of fairseq's that tells where a run stands."""
    shown = name.startswith(("tupe.", "valid")) or message.startswith(("done training", "Loaded checkpoint"))
    return shown and len(message) <= LONGEST and "\n" not in message


def is_progress(name: str, message: str) -> bool:
    """Whether it is a line of progress, of either engine."""
    return name == "train_inner" or name == "tupe.train" and re.match(r"update \d+/.* left$", message) is not None


_log: Log | None = None


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Inside, the log of a run goes where this module says. What libraries set up for the root logger is put aside
    meanwhile."""
    global _log
    root = logging.getLogger()
    before, level, _log = list(root.handlers), root.level, Log()
    kept = [handler for handler in before if type(handler) is not logging.StreamHandler]
    root.handlers[:] = [*kept, _log] if is_into_log(folder) else [*kept, _log, Console()]
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = before
        _log.close()
        _log = None


def keep_traceback() -> str:
    """Write the traceback of the exception that is handled into the log, and return the end of an error's line that
    says where; without a log, print it."""
    if _log is None or not isinstance(_log.target, File) or _log.target.stream is None:
        traceback.print_exc()
        return ""
    _log.target.stream.write(traceback.format_exc())
    return f"; see {_log.target.baseFilename}"
