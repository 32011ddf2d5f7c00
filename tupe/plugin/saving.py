"""Checkpoints where fairseq itself writes and reads them: never half of one, checked before a run resumes, and through
the gate."""

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf

from ..checkpoints.gate import read_checkpoint
from ..common.safe_load import num_updates
from ..run.folder import damage_in, written
from .pretrained import as_checkpoint

logger = logging.getLogger("tupe.launch")


class Refused(ValueError, SystemExit):
    """A mistake of the user. As a SystemExit it is one line of fairseq's own programs, too."""

    code = property(str)


def save(state: Any, path: str, async_write: bool = False) -> None:
    """Write a checkpoint whole; async_write is ignored. fairseq would try a full disk three times, and append to what
    is there."""
    with written(path) as file:
        torch.save(state, file)


def copy(source: str, path: str, overwrite: bool = True) -> str:
    """Copy a checkpoint in the same way. fairseq would write into the file that is to be resumed from."""
    with written(path) as file, open(source, "rb") as whole:
        shutil.copyfileobj(whole, file, 2**20)
    return path


class Paths(PathManager):
    """fairseq's, but for `copy`, and that a folder with a model is a file to load."""

    copy = staticmethod(copy)

    @staticmethod
    def isfile(path: str) -> bool:
        return PathManager.isfile(path) or Path(path, "config.json").is_file()


class InEpoch:
    """An epoch's iterator that is not at its end."""

    def __init__(self, iterator: EpochBatchIterator):
        self.iterator = iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)

    def end_of_epoch(self) -> bool:
        return False


def save_checkpoint(
    options: DictConfig, trainer: Trainer, iterator: EpochBatchIterator, score: float | None, original: Any
) -> Any:
    """As fairseq's, which writes no checkpoint_EPOCH_UPDATES.pt at the end of an epoch, whatever the interval."""
    every, updates = options.save_interval_updates, trainer.get_num_updates()
    by_updates = options.no_epoch_checkpoints and every > 0 and updates % every == 0
    return original(options, trainer, InEpoch(iterator) if by_updates else iterator, score)


LAST = "checkpoint_last.pt"
WRITTEN = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")  # what fairseq calls the others


def check_start(restore_file: str | None, continue_once: str | None) -> None:
    """Raise ValueError for a checkpoint to begin with that is missing, from which fairseq would train from scratch; and
    for --restore-file, from which a run that is started again would begin again."""
    if restore_file not in (None, LAST):
        raise ValueError("--restore-file: give checkpoint.continue_once=FILE, where a run begins and goes on as any")
    if continue_once and not PathManager.exists(continue_once):
        raise ValueError(f"checkpoint.continue_once={continue_once}: no such file")


def resume_from_newest(config: DictConfig) -> None:
    """Give a run whose folder has no whole checkpoint_last.pt the newest checkpoint there that is whole. fairseq would
    start over, and then delete or replace it. config: the whole configuration. Raises ValueError if there are
    checkpoints and all are damaged."""
    options = config.checkpoint
    check_start(options.restore_file, options.continue_once)
    last, wrong = Path(options.save_dir, LAST), "missing"
    if options.no_save or options.no_last_checkpoints:
        return
    if last.exists():
        if not (damage := damage_in(last)):
            return
        wrong = f"damaged ({damage})"
    found = {path: _updates(path, config.model._name) for path in last.parent.glob("checkpoint*.pt")}
    found = {path: updates for path, updates in found.items() if WRITTEN.fullmatch(path.name)}
    for path in sorted(found, key=found.get, reverse=True):
        if damage_in(path) is None:
            logger.warning(
                f"{last} is {wrong}: resuming from {path} ({found[path]} updates), the newest that is whole; to start "
                "over, choose another folder or remove this one"
            )
            copy(str(path), str(last))
            return
    if found or wrong != "missing":
        raise ValueError(f"{last} is {wrong}, and no other there can be loaded; move them away to start over")


def _updates(path, architecture):
    """Updates after which a checkpoint was written; 0 if it cannot be read. Does not read the tensors."""
    try:
        return num_updates(read_checkpoint(path, mmap=True, trained=architecture))
    except (ValueError, LookupError, TypeError):
        return 0


# ------------------------------------------------------------------------------------------- where fairseq itself reads


_trained = None  # the architecture of the run that reads a checkpoint to go on from it
_start = None  # the checkpoint that it starts from, as a model without heads


def load_checkpoint_to_cpu(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool = False
) -> dict:
    """fairseq's, through the gate; of a folder of transformers too."""
    try:
        file = PathManager.get_local_path(path)
        state = as_checkpoint(file) if Path(file).is_dir() else read_checkpoint(file, trained=_trained)
    except ValueError as error:
        raise Refused(str(error)) from None
    if path == _start:
        state["extra_state"].pop("previous_training_time", None)  # which would count towards `stop_time_hours`
        # A head of another task, or seed, may have the right size.
        state["model"] = {key: x for key, x in state["model"].items() if not key.startswith("classification_heads.")}
    state["cfg"] = OmegaConf.create(state["cfg"])
    overwrite_args_by_name(state["cfg"], arg_overrides or {})
    return checkpoint_utils._upgrade_state_dict(state)


def load_checkpoint(trainer: Trainer, *args, original: Any, **kwargs) -> dict | None:
    """A trainer's model is already built, from the configuration of its own run. Every process reads the file: what the
    first one would send to the others holds more than plain data."""
    global _trained, _start
    trainer.cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
    _trained, _start = trainer.cfg.model._name, trainer.cfg.checkpoint.finetune_from_model
    try:
        return original(trainer, *args, **kwargs)
    finally:
        _trained = _start = None
