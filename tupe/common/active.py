"""A run that this process trains, in either engine: its folder, its record from the first update on, and what errors
become. Needs only torch."""

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from ..run.folder import DISK, lock, unlock
from ..run.processes import prepare_for_data_workers
from ..run.progress import Progress
from ..run.record import DIVERGED, DIVERGENCE, NAME, REFUSED, STALLED, STOPPED, Record, another, begun, now
from . import console
from .options import Refusal

logger = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[1]


class Run:
    """record: what is known before training; folder: its own. writes: whether this process writes there, as one of
    several does.

    earlier: the record of what the folder holds already; the file stays as it is until the first update, because any
    failure until then is that of a start. updates: after the last one of this process, None until the first.
    """

    progress: Progress

    def __init__(self, record: Record, folder: Path, writes: bool):
        self.record, self.folder, self.writes = record, folder.resolve(), writes
        self.began_at, self.earlier, self.updates = now(), None, None

    def lock(self) -> None:
        """Raises BlockingIOError if another process trains in the folder, ValueError if too few files may be open."""
        prepare_for_data_workers()
        if self.writes and not lock(self.folder):
            raise BlockingIOError(f"another process is training in {self.folder}")

    def unlock(self) -> None:
        if self.writes:
            unlock(self.folder)

    def read(self, defaults: dict) -> None:
        """Read the record of the run that the folder holds, if one has begun. Raises ValueError if it is another."""
        self.earlier = begun(self.folder)
        if self.earlier and (pairs := self.record.differences(self.earlier)):
            raise ValueError(another(self.folder, pairs, defaults))

    def reach(self, updates: int) -> None:
        """Take note of an update. With the first one the run has begun, or goes on."""
        first, self.updates = self.updates is None, updates
        if first and self.writes:
            self.record.started_at = self.record.started_at or self.began_at
            self.record.save(self.folder)

    def note_stall(self, reason: str) -> None:
        if self.writes and (self.updates or not self.earlier):
            self.record.end(reason, STALLED)
            self.record.save(self.folder)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, the run is trained; its record gets the outcome."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def end(self, error: BaseException | None = None, status: int | None = None) -> None:
        """Complete the record, and unlock the folder. error: what ended the process, if anything did; status: its exit
        status."""
        self.progress.end()
        if not self.writes:
            return
        record = self.record
        if error is None:
            self.conclude()
        elif isinstance(error, Exception):
            record.end(reason(error), status_of(error) if status is None else status)
        if record.state == "running":  # interrupted, or at a time limit: it continues when it is started again
            record.state = "stopped"
            if isinstance(error, SystemExit) and error.code == STOPPED:
                record.failure = {"reason": "stopped by a signal", "status": STOPPED}
        if self.folder.is_dir() and (self.updates is not None or error is None or not self.earlier):
            try:
                record.save(self.folder)
            except OSError as full:  # which may be what ended the process
                logger.error(f"{self.folder / NAME} cannot be written: {full}")
        self.unlock()
        if record.state == "stopped":
            when = "before its first update" if self.updates is None else f"after update {self.updates}"
            logger.warning(f"stopped {when}; the same command {'resumes' if self.resumes() else 'starts it again'}")

    def conclude(self) -> None:
        """Complete the record of a run whose training has come to its end."""
        self.record.started_at = self.record.started_at or self.began_at
        self.record.end()

    def resumes(self) -> bool:
        """Whether there is something to go on from."""
        raise NotImplementedError


def device(cpu: bool = False) -> str:
    """What this process trains on. cpu: on the CPU even if there is a GPU."""
    threads, gpu = torch.get_num_threads(), torch.cuda.is_available() and not cpu
    return torch.cuda.get_device_name() if gpu else f"CPU, {threads} thread{'s' if threads != 1 else ''}"


def reason(error: Exception) -> str:
    """Why a run failed, in one line of at most 200 characters."""
    error = in_worker(error)
    kind = DIVERGENCE if isinstance(error, FloatingPointError) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())}"[:200]


def status_of(error: Exception) -> int:
    """The exit status of training that failed."""
    return DIVERGED if isinstance(error, FloatingPointError) else REFUSED if is_told(error) else 1


def in_worker(error: Exception) -> Exception:
    """The ValueError of this package behind one that PyTorch raises for a data worker, with a traceback as its text;
    any other error as it is."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith("Caught ValueError in DataLoader worker"):
        _, raised, said = text.rstrip().rpartition("\nValueError: ")
        files = re.findall(r'^  File "(.+)", line', text, re.MULTILINE)
        if raised and files and Path(files[-1]).is_relative_to(PACKAGE):
            return ValueError(said)
    return error


def is_told(error: Exception) -> bool:
    """Whether an error is told the user in one line, with the status `REFUSED`: a ValueError of this package, or an
    OSError of a disk that is full or read-only."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = isinstance(error, ValueError) and frames and frames[-1].f_globals["__name__"].startswith("tupe.")
    return bool(ours or in_worker(error) is not error or isinstance(error, OSError) and error.errno in DISK)


def refuse(error: Exception) -> NoReturn:
    """Raise an error that is handled as it is, if it is a ValueError of this package (a mistake of the user), a
    BlockingIOError, or an OSError of a disk that is full or read-only. Else log its traceback, and raise `Refusal` with
    one line."""
    if (told := in_worker(error)) is not error:
        raise told from None
    if is_told(error) or isinstance(error, BlockingIOError):
        raise error
    said = f"training failed: {type(error).__name__}: {error}{console.keep_traceback()}"
    raise Refusal(said, status_of(error)) from error
