"""The folder of a run of the second engine: its lock, its record, and its checkpoints, whole or not there."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..common import record as records
from ..common.active import Active, device, status_of
from ..common.record import Record

PARTIAL = "partial"  # a folder in a run's, of what is being written
STATE = "trainer_state.json"
NOT_THE_MODEL = (
    "optimizer", "scheduler", "scaler", "rng_state", "trainer_state", "training_args", "global_step",
    "pytorch_model_fsdp", "latest", "zero_to_",
)  # fmt: skip


def checkpoints(folder: Path) -> dict[int, Path]:
    """{updates: folder} of a run's checkpoints, in order."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and (path / STATE).is_file()))


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
    earlier = records.begun(folder)
    if earlier and (pairs := record.differences(earlier)):
        raise ValueError(records.another(folder, pairs, defaults))
    return earlier


class Run(Active):
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
            record.begin(device())
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
        if error is None:
            self.record.started_at = self.record.started_at or self.began_at
            self.record.end()
        self.close(error, status_of(error), newest(self.folder)[0] > 0)
