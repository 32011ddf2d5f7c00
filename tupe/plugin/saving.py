"""Checkpoints that cannot be half: written and copied under another name first, and checked before a run resumes."""

import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from ..record import damage
from ..safe_load import num_updates, read_checkpoint

logger = logging.getLogger("tupe.launch")

PARTIAL = ".tmp"  # fairseq's name for files that it has begun to write


def save(state: Any, path: str, async_write: bool = False) -> None:
    """Write a checkpoint: readers see the old file or the new one, also after a power failure. async_write is ignored.

    fairseq would try a full disk three times, and append to what is there. Raises ValueError with one line.
    """
    with _written_whole(path) as file:
        torch.save(state, file)


def copy(source: str, path: str, overwrite: bool = True) -> str:
    """Copy a checkpoint in the same way. fairseq would write into the file that is to be resumed from."""
    with _written_whole(path) as file, open(source, "rb") as whole:
        shutil.copyfileobj(whole, file, 2**20)
    return path


@contextmanager
def _written_whole(path):
    """A file to write, which is on the disk and then replaces `path` if nothing fails, and is deleted otherwise."""
    partial = Path(f"{path}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        full = shutil.disk_usage(partial.parent).free < 2**20
        partial.unlink(missing_ok=True)
        if not isinstance(error, (OSError, RuntimeError)):  # RuntimeError: of torch, when it cannot write
            raise
        reason = "the disk is full" if full else str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be written: {reason}; all others are as they were") from error


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
    others = {path: _updates(path) for path in Path(save_dir).glob("checkpoint*.pt") if path != last}
    for path in sorted((path for path in others if others[path] is not None), key=others.get, reverse=True):
        if damage(path) is None:
            resuming = f"resuming from {path} ({others[path]} updates), the newest that is whole"
            logger.warning(f"{last} is damaged ({wrong}); {resuming}")
            return str(path)
    remedy = "no other checkpoint there can be loaded; move it away to start over"
    raise ValueError(f"{last} is damaged ({wrong}), and {remedy}")


def _updates(path):
    """Updates after which a checkpoint was written, None if it is none of ours. Does not read the tensors."""
    try:
        return num_updates(read_checkpoint(path, mmap=True))
    except (ValueError, LookupError, TypeError):
        return None
