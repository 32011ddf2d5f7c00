"""The folder of a run of the second engine: its checkpoints, whole or not there, and its model beside them."""

import logging
import os
import re
import shutil
from pathlib import Path

from ..common.active import Run
from ..run import checksums
from ..run.folder import PARTIAL
from ..run.record import NAME, command_line

logger = logging.getLogger("tupe.train")

STATE = "training.json"  # of a checkpoint: its number of updates, and what was logged until then
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"


def checkpoints(folder: Path) -> dict[int, Path]:
    """{updates: folder} of a run's checkpoints, in order."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and (path / STATE).is_file()))


def newest(folder: Path) -> tuple[int, Path | None]:
    """(updates, folder) of a run's last checkpoint; (0, None) without one."""
    return next(reversed(checkpoints(folder).items()), (0, None))


def newest_whole(folder: Path) -> tuple[int, Path | None]:
    """As `newest`, of those whose files are whole. Raises ValueError if there are others alone: the run would start
    over."""
    wrong = None
    for updates, path in reversed(checkpoints(folder).items()):
        if (damage := checksums.damaged(path)) is None:
            if wrong:
                logger.warning(f"{wrong}: resuming from {path}, which is whole")
            return updates, path
        wrong = wrong or f"{path} is damaged ({damage})"
    if wrong:
        raise ValueError(f"{wrong}, and no other there is whole; move them away to start over")
    return 0, None


def keep(folder: Path, done: int, count: int, pattern: int) -> None:
    """Delete a run's checkpoints but the last `count` (-1: none is deleted) and those at multiples of `pattern`. One of
    more updates than are `done` is damaged: the run goes on from one before it."""
    own = [(updates, path) for updates, path in checkpoints(folder).items() if updates <= done]
    for updates, path in own[: -count if count > 0 else 0]:
        if not (pattern > 0 and updates % pattern == 0):
            shutil.rmtree(path.rename(f"{path}{PARTIAL}"))  # a half of one is none


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
    known = checksums.read_signed(checkpoint / checksums.NAME)["files"]
    names = [name for name in known if name != OPTIMIZER]
    (folder / checksums.NAME).unlink(missing_ok=True)  # of an earlier model, until all of this one is there
    for file in checkpoint.iterdir():
        if file.name in names:
            partial = folder / f"{file.name}.{os.getpid()}{PARTIAL}"
            partial.unlink(missing_ok=True)
            try:
                os.link(file, partial)
            except OSError:  # of a file system without links
                shutil.copyfile(file, partial)
            partial.replace(folder / file.name)
    checksums.seal(folder, names, command_line(), known)


class TrainRun(Run):
    """A run that this engine trains in this process."""

    def read(self, defaults: dict) -> None:
        """As for any run. Raises ValueError for a folder of another program, too."""
        super().read(defaults)
        if not ((self.folder / NAME).exists() or checkpoints(self.folder)):  # copies of checkpoints are a run
            models = ("config.json", "*.safetensors", "pytorch_model*.bin", "checkpoint*.pt", "checkpoint-*[0-9]")
            if found := [path for pattern in models for path in self.folder.glob(pattern)]:
                raise ValueError(f"{found[0]} is of no run known here; choose another folder")

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Returns whether this validation is the best so far."""
        best = self.record.add_scores(epoch, updates, split, scores)
        if self.writes:
            self.record.save(self.folder)
        return best

    def resumes(self) -> bool:
        return bool(checkpoints(self.folder))
