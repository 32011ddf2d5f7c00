"""Checkpoints where fairseq itself writes and reads them: never half of one, checked before a run resumes, and through
the gate."""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf

from ..checkpoints.gate import read_checkpoint
from ..common.record import corruption_in
from ..common.safe_load import num_updates
from ..config import flag
from .pretrained import as_checkpoint

logger = logging.getLogger("tupe.launch")

PARTIAL = ".tmp"  # fairseq's name for files that it has begun to write


@contextmanager
def written_whole(path: str | Path) -> Iterator[Any]:
    """A file to write, which is on the disk and then replaces `path` if nothing fails, and is deleted otherwise.
    Readers see the old file or the new one, also after a power failure. Raises ValueError with one line."""
    partial = Path(f"{path}.{os.getpid()}{PARTIAL}")  # two processes may write the same file
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        full = shutil.disk_usage(partial.parent).free < 2**20
        with suppress(OSError):  # of a read-only disk
            partial.unlink(missing_ok=True)
        if not isinstance(error, (OSError, RuntimeError)):  # RuntimeError: of torch, when it cannot write
            raise
        reason = "the disk is full" if full else str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be written: {reason}; existing checkpoints are unchanged") from error


def save(state: Any, path: str, async_write: bool = False) -> None:
    """Write a checkpoint whole; async_write is ignored. fairseq would try a full disk three times, and append to what
    is there."""
    with written_whole(path) as file:
        torch.save(state, file)


def copy(source: str, path: str, overwrite: bool = True) -> str:
    """Copy a checkpoint in the same way. fairseq would write into the file that is to be resumed from."""
    with written_whole(path) as file, open(source, "rb") as whole:
        shutil.copyfileobj(whole, file, 2**20)
    return path


class Paths(PathManager):
    """fairseq's, but for `copy`, and that a folder with a model is a file to load."""

    copy = staticmethod(copy)

    @staticmethod
    def isfile(path: str) -> bool:
        return PathManager.isfile(path) or Path(path, "config.json").is_file()


def remove_partial(folder: Path) -> None:
    """Delete what a killed process had begun to write."""
    for path in folder.glob(f"*.pt*{PARTIAL}"):
        path.unlink()


LAST = "checkpoint_last.pt"
WRITTEN = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)")  # what fairseq calls the others, without the end


def check_restore(options: Mapping) -> None:
    """Raise ValueError if a checkpoint that is to be loaded is missing: fairseq would train from scratch. options: the
    section `checkpoint`, or what was given of it."""
    for name in ("restore_file", "continue_once"):
        path = options.get(name)
        if path and path != LAST:
            path = path.replace(".pt", f"{options.get('checkpoint_suffix') or ''}.pt")
            if not PathManager.exists(path):
                given = f"{flag(name)} {path}"
                raise ValueError(f"{given}: no such file; without the option a run resumes its own folder")


def check_asserts() -> None:
    """Raise ValueError where Python skips assert: in one of fairseq's, it copies a checkpoint to checkpoint_last.pt."""
    if not __debug__:
        raise ValueError("PYTHONOPTIMIZE or python -O: fairseq would write no checkpoint_last.pt; train without it")


def resume_from_newest(config: DictConfig) -> None:
    """Let a run whose folder has no whole checkpoint_last.pt resume from the newest checkpoint there that is whole.

    fairseq would start over, and then delete or replace it. config: the whole configuration. A checkpoint without the
    optimizer's state is none to resume from. Raises ValueError if there are checkpoints and all are damaged.
    """
    options, parallel = config.checkpoint, config.distributed_training
    check_asserts()
    check_restore(options)
    if options.restore_file != LAST or options.no_save:
        return
    folder, ends = Path(options.save_dir), [f"{options.checkpoint_suffix or ''}.pt"]
    if parallel.use_sharded_state and parallel.ddp_backend == "fully_sharded":  # a file for each process
        ends = [end.replace(".pt", f"-shard{n}.pt") for n in range(parallel.distributed_world_size) for end in ends]
    wrong = None if options.no_last_checkpoints else _corruption_in(folder / "checkpoint_last", ends)
    if wrong is None and not options.no_last_checkpoints:
        return
    stems = {path.name.removesuffix(ends[0]) for path in folder.glob(f"checkpoint*{ends[0]}")}
    stems = [folder / stem for stem in stems if WRITTEN.fullmatch(stem)]
    updates = {stem: _updates(f"{stem}{ends[0]}", config.model._name) for stem in stems}
    for stem in sorted(filter(updates.get, stems), key=updates.get, reverse=True):
        if _corruption_in(stem, ends) is None:
            last = folder / f"checkpoint_last{ends[0]}"
            reason = f"{last} is {wrong}: " if wrong else ""
            logger.warning(
                f"{reason}resuming from {stem}{ends[0]} ({updates[stem]} updates), the newest that is whole; to start "
                "over, choose another folder or remove this one"
            )
            if options.no_last_checkpoints:
                options.restore_file, options.finetune_from_model = f"{stem}.pt", None  # fairseq takes only one of them
            else:
                for end in ends:
                    _link(f"{stem}{end}", f"{folder}/checkpoint_last{end}")
            return
    if wrong not in (None, MISSING) or None in updates.values():
        remedy = "no other checkpoint there can be loaded; move them away to start over"
        raise ValueError(f"{folder / 'checkpoint_last'}{ends[0]} is {wrong or MISSING}, and {remedy}")
    if stems:
        logger.warning(f"{folder}: no checkpoint there has the optimizer's state: the run starts over")


MISSING = "missing"


def _corruption_in(stem, ends):
    """What is wrong with a checkpoint, of several files if it is sharded; None if it is whole."""
    for path in (Path(f"{stem}{end}") for end in ends):
        if not path.exists():
            return MISSING
        if wrong := corruption_in(path):
            return f"damaged ({wrong})"
    return None


def _link(source, path):
    """Give a checkpoint a second name, which takes no space where the file system can. Nothing writes into either."""
    try:
        partial = Path(f"{path}{PARTIAL}")
        partial.unlink(missing_ok=True)
        os.link(source, partial)
        partial.replace(path)
    except OSError:
        copy(source, path)


def _updates(path, architecture):
    """Updates after which a checkpoint was written, 0 if no run can resume from it for want of the optimizer's state,
    None if it cannot be read. Does not read the tensors."""
    try:
        state = read_checkpoint(path, mmap=True, trained=architecture)
        return num_updates(state) if state["last_optimizer_state"] else 0
    except (ValueError, LookupError, TypeError):
        return None


# ------------------------------------------------------------------------------------------- where fairseq itself reads


class NotAdmitted(ValueError, SystemExit):
    """A file that does not pass the gate. As a SystemExit it is one line of fairseq's own programs, too."""

    code = property(str)


_trained = None  # the architecture of the run that reads a checkpoint to go on from it


def load_checkpoint_to_cpu(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool = False
) -> dict:
    """fairseq's, through the gate; of a folder of transformers too."""
    try:
        file = PathManager.get_local_path(path)
        state = as_checkpoint(file) if Path(file).is_dir() else read_checkpoint(file, trained=_trained)
    except ValueError as error:
        raise NotAdmitted(str(error)) from None
    state["cfg"] = OmegaConf.create(state["cfg"])
    overwrite_args_by_name(state["cfg"], arg_overrides or {})
    return checkpoint_utils._upgrade_state_dict(state)


def load_checkpoint(trainer: Trainer, *args, original: Any, **kwargs) -> dict | None:
    """A trainer's model is already built, from the configuration of its own run."""
    global _trained
    _trained = trainer.cfg.model._name
    try:
        return original(trainer, *args, **kwargs)
    finally:
        _trained = None
