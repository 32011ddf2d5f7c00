"""The folder of a run of the second engine: its lock, its record, and its checkpoints, whole or not there."""

import hashlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..common import record as records
from ..common.active import Active, device, status_of
from ..common.record import Record
from ..common.safe_load import read_config

logger = logging.getLogger("tupe.train")

PARTIAL = "partial"  # a folder in a run's, of what is being written
STATE = "training.json"  # of a checkpoint: its number of updates, and what was logged until then
OPTIMIZER = "optimizer.pt"
SUMS = "SHA256SUMS"
NOT_THE_MODEL = OPTIMIZER, SUMS


def checkpoints(folder: Path) -> dict[int, Path]:
    """{updates: folder} of a run's checkpoints, in order."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and (path / STATE).is_file()))


def newest(folder: Path) -> tuple[int, Path | None]:
    """(updates, folder) of a run's last checkpoint; (0, None) without one."""
    return next(reversed(checkpoints(folder).items()), (0, None))


def seal(folder: Path) -> None:
    """Note the checksums of a checkpoint's files, for `damage_in`, as the command sha256sum does."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    sums = "".join(f"{_sha256(folder / path)}  {path}\n" for path in files)
    records.write_atomically(folder / SUMS, sums)


def damage_in(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if nothing is, or if no checksums were written."""
    if not (folder / SUMS).is_file():
        return None
    lines = (folder / SUMS).read_text(errors="replace").splitlines()
    if not lines or not all(re.match("[0-9a-f]{64}  .", line) for line in lines):
        return f"{SUMS} is not what was written"
    for checksum, name in (line.split("  ", 1) for line in lines):
        if not (folder / name).is_file() or _sha256(folder / name) != checksum:
            return f"{name} is {'not what was written' if (folder / name).is_file() else 'missing'}"
    return None


def _sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def set_damaged_aside(folder: Path) -> None:
    """Rename the newest checkpoints until one is whole. Raises ValueError if none is: the run would start over."""
    damaged = []
    for path in reversed(checkpoints(folder).values()):
        if not (wrong := damage_in(path)):
            break
        damaged.append((path, wrong))
    else:
        if damaged:
            path, wrong = damaged[0]
            raise ValueError(f"{path} is damaged ({wrong}), and no other there is whole; move them away to start over")
    for path, wrong in damaged:
        names = (f"damaged-{path.name}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
        aside = path.rename(next(folder / name for name in names if not (folder / name).exists()))
        logger.warning(f"{path} is damaged ({wrong}): it is called {aside.name} now; resuming from one before it")


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
    """Give the model of a checkpoint, without what only training needs, its place in the run's folder, and its number
    of updates, which `record.updates_of` reads."""
    for file in checkpoint.iterdir():
        if not file.name.startswith(NOT_THE_MODEL):
            temporary = folder / f"{file.name}.{PARTIAL}"
            temporary.unlink(missing_ok=True)
            try:
                os.link(file, temporary)
            except OSError:  # of a file system without links
                shutil.copyfile(file, temporary)
            temporary.replace(folder / file.name)


def foreign(folder: Path) -> str | None:
    """What a folder without a record holds of another program, which a run would go on from, or replace; a copied
    checkpoint of a run is none."""
    if (folder / records.NAME).exists():
        return None
    if there := checkpoints(folder).values():
        return next((path.name for path in there if not _is_ours(path)), None)
    models = ("config.json", "*.safetensors", "pytorch_model*.bin", "checkpoint*.pt", "checkpoint-*")
    return next((path.name for pattern in models for path in sorted(folder.glob(pattern))), None)


def _is_ours(checkpoint):
    config = checkpoint / "config.json"
    return (checkpoint / SUMS).is_file() or config.is_file() and read_config(config).get("model_type") == "tupe"


def differences(record: Record, folder: Path, defaults: dict) -> Record | None:
    """The record of the run that a folder holds, if it has begun. Raises ValueError if it is another run, or of another
    program."""
    earlier = records.begun(folder)
    if not earlier and (found := foreign(folder)):
        raise ValueError(f"{folder} holds {found}, which is of no run known here; choose another folder")
    if earlier and (pairs := record.differences(earlier)):
        raise ValueError(records.another(folder, pairs, defaults))
    return earlier


class Run(Active):
    """A run that this process trains. record: what is known before training; writes: whether this process is the one
    that writes into the folder; cpu: whether they do so there even if there is a GPU."""

    def __init__(self, record: Record, folder: Path, writes: bool, defaults: dict, cpu: bool = False):
        self.record, self.folder, self.writes, self.updates = record, folder, writes, None
        if writes and not records.lock(folder):
            raise BlockingIOError(f"another process is training in {folder}")
        try:
            self.earlier = differences(record, folder, defaults)
            if writes and self.earlier and (self.earlier.state, self.earlier.budget) != ("finished", record.budget):
                set_damaged_aside(folder)
        except (ValueError, OSError):
            records.unlock(folder)
            raise
        if writes:
            for path in (folder / PARTIAL).glob("checkpoint-*"):
                shutil.rmtree(path, ignore_errors=True)
            record.begin(device(cpu))
        start, _ = newest(folder)
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
