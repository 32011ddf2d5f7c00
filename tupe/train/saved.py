"""The folder of a run of the second engine: its checkpoints, whole or not there, and its model beside them."""

import logging
import os
import re
import shutil
from pathlib import Path

from ..common.active import Run, device
from ..run import checksums
from ..run.folder import PARTIAL, damage_in, remove_partial
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
        if (path / checksums.NAME).exists():
            damage = checksums.damaged(path)
        else:  # of a version without them
            found = ((name, damage_in(path / name)) for name in (WEIGHTS, OPTIMIZER))
            damage = next((f"{name}: {said}" for name, said in found if said), None)
        if damage is None:
            if wrong:
                logger.warning(f"{wrong}: resuming from {path}, which is whole")
            return updates, path
        wrong = wrong or f"{path} is damaged ({damage})"
    if wrong:
        raise ValueError(f"{wrong}, and no other there is whole; move them away to start over")
    return 0, None


def keep(folder: Path, count: int, pattern: int) -> None:
    """Delete all checkpoints but the last `count` (-1: none is deleted) and those at multiples of `pattern`."""
    for updates, path in list(checkpoints(folder).items())[: -count if count > 0 else 0]:
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
            partial = folder / f"{file.name}{PARTIAL}"
            partial.unlink(missing_ok=True)
            try:
                os.link(file, partial)
            except OSError:  # of a file system without links
                shutil.copyfile(file, partial)
            partial.replace(folder / file.name)
    checksums.seal(folder, names, command_line(), known)


def foreign(folder: Path) -> str | None:
    """What a folder without a run holds of another program, which a run would replace; copies of a run's checkpoints
    are not foreign."""
    if (folder / NAME).exists() or checkpoints(folder):
        return None
    models = ("config.json", "*.safetensors", "pytorch_model*.bin", "checkpoint*.pt", "checkpoint-*[0-9]")
    return next((path.name for pattern in models for path in sorted(folder.glob(pattern))), None)


class TrainRun(Run):
    """A run that this engine trains in this process."""

    def read(self, defaults: dict) -> None:
        """As for any run. Raises ValueError for a folder of another program, too."""
        super().read(defaults)
        if not self.earlier and (found := foreign(self.folder)):
            raise ValueError(f"{self.folder} holds {found}, which is of no run known here; choose another folder")

    def begin(self, defaults: dict, cpu: bool) -> None:
        """Lock the folder, read what it holds, and tidy it up. cpu: whether it is trained there even if there is a
        GPU. Raises BlockingIOError, and ValueError for another run's folder."""
        self.lock()
        self.read(defaults)
        if self.writes:
            remove_partial(self.folder)
            self.record.begin(device(cpu))

    def go_on(self, start: int) -> None:
        """Take over what the run has done so far. start: updates of the checkpoint that it goes on from."""
        if self.earlier:
            self.record.go_on(self.earlier, start)
            self.record.scores = [entry for entry in self.record.scores if entry["num_updates"] <= start]

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Returns whether this validation is the best so far."""
        best = self.record.add_scores(epoch, updates, split, scores)
        if self.writes:
            self.record.save(self.folder)
        return best

    def resumes(self) -> bool:
        return bool(checkpoints(self.folder))
