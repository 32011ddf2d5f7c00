"""Checkpoints that cannot be half: written and copied under another name first, and checked before a run resumes."""

import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from ..record import damage
from ..safe_load import num_updates

logger = logging.getLogger("tupe.launch")

PARTIAL = ".tmp"  # fairseq's name for files that it has begun to write


def save(state: Any, path: str, async_write: bool = False) -> None:
    """Write a checkpoint: readers see the old file or the new one, also after a power failure. async_write is ignored.

    fairseq would try a full disk three times, and append to what is there. Raises ValueError with one line.
    """
    with _written_whole(path) as partial, open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def copy(source: str, path: str, overwrite: bool = True) -> str:
    """Copy a checkpoint in the same way. fairseq would write into the file that is to be resumed from."""
    with _written_whole(path) as partial:
        shutil.copyfile(source, partial)
    return path


class _written_whole:
    """Gives the name of a file to write, which replaces `path` if nothing fails, and is deleted otherwise."""

    def __init__(self, path):
        self.path, self.partial = path, f"{path}{PARTIAL}"

    def __enter__(self):
        return self.partial

    def __exit__(self, kind, error, traceback):
        if error is None:
            os.replace(self.partial, self.path)
        elif isinstance(error, (OSError, RuntimeError)):  # of torch, when it cannot write
            full = shutil.disk_usage(Path(self.path).parent).free < 2**20
            Path(self.partial).unlink(missing_ok=True)
            reason = "the disk is full" if full else str(error).partition("\n")[0]
            raise ValueError(f"{self.path} cannot be written: {reason}; all others are as they were") from error


class _Paths(PathManager):
    copy = staticmethod(copy)


checkpoint_utils.torch_persistent_save = save
checkpoint_utils.PathManager = _Paths


def remove_partial(folder: Path) -> None:
    """Delete what a killed process had begun to write."""
    for path in folder.glob(f"*.pt{PARTIAL}"):
        path.unlink()


def stand_in_checkpoint(save_dir: str | Path) -> str | None:
    """The newest whole checkpoint of a folder whose checkpoint_last.pt is damaged, else None.

    Raises ValueError if there is no other whole checkpoint.
    """
    last = Path(save_dir) / "checkpoint_last.pt"
    wrong = damage(last) if last.exists() else None
    if wrong is None:
        return None
    others = [path for path in Path(save_dir).glob("checkpoint*.pt") if path != last and damage(path) is None]
    whole = [(updates, str(path)) for path in others if (updates := _num_updates(path)) is not None]
    if not whole:
        remedy = "no other checkpoint there can be loaded; move it away to start over"
        raise ValueError(f"{last} is damaged ({wrong}), and {remedy}")
    updates, path = max(whole)
    logger.warning(f"{last} is damaged ({wrong}); resuming from {path} ({updates} updates), the newest that is whole")
    return path


def _num_updates(path):
    """The number of updates of a checkpoint, None if it is none of ours. Does not read the tensors."""
    try:
        return num_updates(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (RuntimeError, EOFError, OSError, KeyError, TypeError, pickle.UnpicklingError):
        return None
