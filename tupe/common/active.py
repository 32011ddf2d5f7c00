"""A run that this process trains, in either engine: its record from the first update on, and what errors become. Needs
only torch."""

import logging
import traceback
from collections.abc import Callable

import torch

from . import console
from .options import Refusal
from .record import DISK, DIVERGED, DIVERGENCE, NAME, STOPPED, unlock

logger = logging.getLogger(__name__)


class Active:
    """Subclasses set `record`, `folder`, `writes`, `began_at`, `updates` (None until the first one) and `earlier`, the
    record that the run goes on from: the file stays as it is until the first update."""

    def reach(self, updates: int) -> None:
        """Take note of an update. With the first one the run has begun, or goes on: until then any failure is that of a
        start, and changes no run's record."""
        first, self.updates = self.updates is None, updates
        if first and self.writes:
            self.record.started_at = self.record.started_at or self.began_at
            self.record.save(self.folder)

    def close(self, error: BaseException | None, status: int, resumes: bool) -> None:
        """Write the record of a run that has ended, or that `error` has stopped, and unlock its folder. status: exit
        status of a failure; resumes: whether there is something to go on from."""
        record = self.record
        if isinstance(error, Exception):
            record.end(reason(error), status)
        elif record.state == "running":  # interrupted, or at a time limit: it continues when it is started again
            record.state = "stopped"
            if isinstance(error, SystemExit) and error.code == STOPPED:
                record.failure = {"reason": "stopped by a signal", "status": STOPPED}
        if self.folder.is_dir() and (self.updates is not None or error is None or not self.earlier):
            try:
                record.save(self.folder)
            except OSError as full:  # which may be what ended the process
                logger.error(f"{self.folder / NAME} cannot be written: {full}")
        unlock(self.folder)
        if record.state == "stopped":
            when = "before its first update" if self.updates is None else f"after update {self.updates}"
            logger.warning(f"stopped {when}; the same command {'resumes' if resumes else 'starts it again'}")


def device(cpu: bool = False) -> str:
    """What this process trains on. cpu: on the CPU even if there is a GPU."""
    threads, gpu = torch.get_num_threads(), torch.cuda.is_available() and not cpu
    return torch.cuda.get_device_name() if gpu else f"CPU, {threads} thread{'s' * (threads != 1)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU or the machine ran out of memory."""
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def reason(error: Exception) -> str:
    """Why a run failed, in one line of at most 200 characters."""
    kind = DIVERGENCE if isinstance(error, FloatingPointError) else type(error).__name__
    return f"{'out of memory' if is_out_of_memory(error) else kind}: {' '.join(str(error).split())}"[:200]


def status_of(error: BaseException) -> int:
    """The exit status of training that failed."""
    return DIVERGED if isinstance(error, FloatingPointError) else 1


def refuse(error: Exception, others: Callable[[], str] = str) -> None:
    """Log the traceback of an error that is handled and raise `Refusal` with one line; but leave alone a ValueError of
    this package (a mistake of the user), a BlockingIOError, and an OSError of a disk that is full or read-only. others:
    what the line says of other processes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = isinstance(error, ValueError) and frames[-1].f_globals["__name__"].startswith("tupe.")
    if not (ours or isinstance(error, BlockingIOError) or isinstance(error, OSError) and error.errno in DISK):
        said = f"training failed: {type(error).__name__}: {error}{others()}{console.keep_traceback()}"
        raise Refusal(said, status_of(error)) from error
