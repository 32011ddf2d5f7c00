"""The folder of a run of the second engine: its lock, its record, and its checkpoints, whole or not there."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..common import record as records
from ..common.record import Record

logger = logging.getLogger(__name__)

PARTIAL = "partial"  # a folder in a run's, of what is being written
STATE = "trainer_state.json"
NOT_THE_MODEL = (
    "optimizer", "scheduler", "scaler", "rng_state", "trainer_state", "training_args", "global_step",
    "pytorch_model_fsdp", "latest", "zero_to_",
)  # fmt: skip


def checkpoints(folder: Path) -> dict[int, Path]:
    """{updates: folder} of a run's checkpoints, in order."""
    found = {int(path.name.partition("-")[2]): path for path in folder.glob("checkpoint-*") if (path / STATE).is_file()}
    return dict(sorted(found.items()))


def newest(folder: Path) -> tuple[int, Path | None]:
    """(updates, folder) of a run's last checkpoint; (0, None) without one."""
    return next(reversed(checkpoints(folder).items()), (0, None))


def keep(folder: Path, count: int, pattern: int) -> None:
    """Delete all checkpoints but the last `count` (-1: none is deleted) and those at multiples of `pattern`."""
    for updates in [*checkpoints(folder)][: -count if count > 0 else 0]:
        if not (pattern > 0 and updates % pattern == 0):
            path = folder / f"checkpoint-{updates}"
            path.rename(folder / PARTIAL / path.name)  # a half of one is none
            shutil.rmtree(folder / PARTIAL / path.name)


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a folder when all of it is on the disk."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as content:
                os.fsync(content.fileno())
    partial.rename(path)


def publish(checkpoint: Path, folder: Path) -> None:
    """Give the model of a checkpoint, without what only training needs, its place in the run's folder."""
    for file in checkpoint.iterdir():
        if not file.name.startswith(NOT_THE_MODEL):
            temporary = folder / f"{file.name}.{PARTIAL}"
            temporary.unlink(missing_ok=True)
            try:
                os.link(file, temporary)
            except OSError:  # of a file system without links
                shutil.copyfile(file, temporary)
            temporary.replace(folder / file.name)


def differences(record: Record, folder: Path, defaults: dict) -> Record | None:
    """The record of the run that a folder holds, if it has begun. Raises ValueError if it is another run."""
    try:
        earlier = records.read(folder)
    except ValueError as error:  # truncated by a power failure, for example
        logger.warning(f"{error}: a new one is begun")
        return None
    if earlier is None or not earlier.started_at:
        return None
    pairs = record.differences(earlier)
    said = [
        f"{name} {_said(defaults.get(name) if old is None else old)} there, "
        f"{_said(defaults.get(name) if new is None else new)} here" for name, (old, new) in pairs.items()
    ]  # fmt: skip
    if said:
        raise ValueError(f"{folder} holds another run ({'; '.join(said)}); choose another folder or remove it")
    return earlier


def _said(value):
    return "none" if value in ("", None) else value


class Run(records.Reached):
    """A run that this process trains. record: what is known before training; writes: whether this process is the one
    that writes into the folder."""

    def __init__(self, record: Record, folder: Path, writes: bool, defaults: dict):
        self.record, self.folder, self.writes, self.updates = record, folder, writes, None
        if writes and not records.lock(folder):
            raise BlockingIOError(f"another process is training in {folder}")
        try:
            self.earlier = differences(record, folder, defaults)
        except ValueError:
            records.unlock(folder)
            raise
        start, _ = newest(folder)
        if writes:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            gpu, threads = torch.cuda.is_available(), torch.get_num_threads()
            record.begin(torch.cuda.get_device_name() if gpu else f"CPU, {threads} thread{'s' * (threads != 1)}")
        self.began_at = records.now()
        if self.earlier:
            record.go_on(self.earlier, start)
            record.scores = [entry for entry in record.scores if entry["num_updates"] <= start]

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Returns whether this validation is the best so far."""
        best = self.record.add_scores(epoch, updates, split, scores)
        if self.writes:
            self.record.save(self.folder)
        return best

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, the run is trained; its record gets the outcome."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _end(self, error):
        if not self.writes:
            return
        record = self.record
        if error is None:
            record.started_at = record.started_at or self.began_at
            record.end()
        elif isinstance(error, Exception):
            record.end(reason(error), records.DIVERGED if isinstance(error, FloatingPointError) else 1)
        else:
            record.state = "stopped"
            if isinstance(error, SystemExit) and error.code == records.STOPPED:
                record.failure = {"reason": "stopped by a signal", "status": records.STOPPED}
            when = "before its first update" if self.updates is None else f"after update {self.updates}"
            logger.warning(f"stopped {when}; the same command {'resumes' if newest(self.folder)[0] else 'starts'} it")
        if error is None or self.updates is not None or not self.earlier:
            try:
                record.save(self.folder)
            except OSError as full:  # which may be what ended the process
                logger.error(f"{self.folder / records.NAME} cannot be written: {full}")
        records.unlock(self.folder)


def reason(error: Exception) -> str:
    """Why a run failed, in one line of at most 200 characters."""
    kind = records.DIVERGENCE if isinstance(error, FloatingPointError) else type(error).__name__
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error):
        kind = "out of memory"
    return f"{kind}: {' '.join(str(error).split())}"[:200]
