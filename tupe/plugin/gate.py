"""The gate: every checkpoint file comes in through `read_checkpoint`, whichever command asks for it, fairseq included.

To unpickle safely is not enough: fairseq builds whatever model, task and criterion a checkpoint's configuration names,
and many of its parts `eval` their options. So only parts that are ours, or that our recipes use, pass by name, each
with the options that its dataclass has, of the types that it says. Whatever else a file holds is left out, or the file
is refused; what is read here, and what is written from it, is plain data.
"""

import argparse
import ast
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch
from fairseq import checkpoint_utils, models, registry, tasks
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from ..common.options import shorten
from ..common.safe_load import NOT_OURS, load_safely, tensors_of

OURS = f"{__name__.partition('.')[0]}."
# Of fairseq's own parts, those that our recipes use, and its defaults. Reading a checkpoint builds a model, a task and
# perhaps a criterion: others than these are refused. All else is only kept as a note: others are left out.
STOCK = {
    "model": (), "task": ("masked_lm", "sentence_prediction"), "criterion": ("masked_lm", "sentence_prediction"),
    "optimizer": ("adam",), "lr_scheduler": ("polynomial_decay", "fixed"), "scoring": ("bleu",), "bpe": (),
    "tokenizer": (),
}  # fmt: skip
BUILT = ("model", "task", "criterion")
REST = {  # what a checkpoint holds beside its configuration and its model -> its types
    "criterion": (dict, type(None)), "optimizer_history": list, "task_state": (dict, type(None)), "extra_state": dict,
    "last_optimizer_state": (dict, type(None)), "fsdp_metadata": dict,
}  # fmt: skip
METERS = ("AverageMeter", "SumMeter", "TimeMeter", "StopwatchMeter", "ConcatTensorMeter")  # fairseq calls them by name


def read_checkpoint(path: str | Path, mmap: bool = False, trained: str | None = None) -> dict:
    """The contents of a checkpoint of this project, on the CPU, as plain data and tensors.

    mmap: leave the tensors on disk until they are used, where the file's format allows it. trained: the architecture of
    the run that goes on from it. Such a run builds all its parts from its own configuration; if that is none of ours,
    the checkpoint's may be another one, too, and of parts of others only the name is read.
    Raises ValueError, with one line, for anything else.
    """
    return admit(load_safely(path, mmap), path, trained)


def admit(state: Any, path: str | Path, trained: str | None = None) -> dict:
    """What `read_checkpoint` returns, of the contents of the file `path`."""
    cfg = state.get("cfg") if isinstance(state, dict) else None
    if not cfg or not isinstance(cfg, dict) or "model" not in state:
        raise ValueError(f"{path} is {NOT_OURS}")
    admitted = {"args": None, "cfg": _configuration(cfg, path, trained), "model": tensors_of(state, path)}
    for name, kind in REST.items():
        if name in state:
            if not isinstance(state[name], kind):
                raise ValueError(f"{path} refused: {name} is of type {type(state[name]).__name__}")
            try:
                admitted[name] = _plain(state[name], f"{path} refused: {name}")
            except RecursionError:
                raise ValueError(f"{path} refused: {name} contains itself") from None
    _check_progress(admitted, path)
    return admitted


def is_ours(part: str, name: str) -> bool:
    """Whether a part of that name is of this package, or made of one of its parts."""
    kind = _registries(part)[0].get(name)
    return kind is not None and any(base.__module__.startswith(OURS) for base in kind.__mro__)


def _registries(part):
    """{name: class}, {name: dataclass} of fairseq."""
    if part == "model":
        return models.MODEL_REGISTRY, models.MODEL_DATACLASS_REGISTRY
    if part == "task":
        return tasks.TASK_REGISTRY, tasks.TASK_DATACLASS_REGISTRY
    return registry.REGISTRIES[part]["registry"], registry.REGISTRIES[part]["dataclass_registry"]


def _configuration(cfg, path, trained):
    """The sections of a configuration that fairseq knows, and of each the options that it has."""
    admitted = {"_name": None}
    for name, section in FairseqConfig.__dataclass_fields__.items():
        options = cfg.get(name)
        if name not in cfg or name == "_name":
            continue
        if name in STOCK:
            admitted[name] = _part(name, options, path, trained)
        elif is_dataclass(section.type) and options is not None:
            admitted[name] = _options(section.type, options, f"{path} refused: cfg.{name}")
    for name in ("model", "task"):
        if not admitted.get(name):
            raise ValueError(f"{path} is {NOT_OURS}")
    return admitted


def _part(part, options, path, trained):
    """A section that chooses a part of fairseq by its name."""
    if isinstance(options, argparse.Namespace):  # of a part without a dataclass, which none of ours is
        options = vars(options)
    name = options.get("_name") or options.get("arch") if isinstance(options, dict) else None
    if part not in BUILT and name is None:
        return None
    if not isinstance(name, str):
        raise ValueError(f"{path} is {NOT_OURS}")
    dataclass = _registries(part)[1].get(name)
    if dataclass is None or not (name in STOCK[part] or is_ours(part, name)):
        if part not in BUILT:
            return None
        if trained is not None and (part != "model" or not is_ours("model", trained)):
            return {"_name": name}
        raise ValueError(
            f"{path} is no checkpoint of this project: its {part} is {shorten(name)}, which fairseq alone reads, where "
            "tupe is not imported"
        )
    admitted = {**_options(dataclass, options, f"{path} refused: cfg.{part}"), "_name": name}
    if part == "model":
        if not {"position", "max_positions"} <= admitted.keys():
            raise ValueError(f"{path} is {NOT_OURS}")
        admitted = {**{f.name: f.default for f in fields(dataclass) if f.default is not MISSING}, **admitted}
    return admitted


def _options(dataclass, options, where):
    """The options that a dataclass has, out of those given. Those that it does not have are of other versions, or put
    there for somebody else."""
    if not isinstance(options, dict):
        raise ValueError(f"{where} is a {type(options).__name__}, not a section")
    admitted = {}
    for f in fields(dataclass):
        if f.name in options and options[f.name] != "???":  # which is how omegaconf writes one that is missing
            value = _plain(options[f.name], f"{where}.{f.name}")
            if not _fits(value, f.type):
                raise ValueError(f"{where}.{f.name} is {shorten(value)}; valid: {_valid(f.type)}")
            admitted[f.name] = value
    return admitted


def _fits(value, kind):
    """Whether a value is of the type of a field. Text must not refer to what omegaconf would look up."""
    if value is None:
        return True
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is list:
        return isinstance(value, (list, tuple)) and all(_fits(each, get_args(kind)[0]) for each in value)
    if kind is Any:  # fairseq evaluates some of them, such as adam_betas="(0.9, 0.98)"
        return _is_literal(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [choice.value for choice in kind]
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind and not (kind is str and "${" in value)


def _is_literal(value):
    if isinstance(value, (list, tuple)):
        return all(map(_is_literal, value))
    if isinstance(value, str):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return False
    return not isinstance(value, (dict, torch.Tensor))


def _valid(kind):
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(choice.value) for choice in kind)
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _plain(value, where):
    """The same as plain Python data and tensors, without any class of others. Raises ValueError if it is something
    else."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return value
    if isinstance(value, np.generic):  # the best score in a checkpoint of fairseq's own tasks
        return _plain(value.item(), where)
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise ValueError(f"{where} has a key of type {type(wrong[0]).__name__}")
        return {key: _plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        values = [_plain(each, where) for each in value]
        return values if isinstance(value, list) else tuple(values)
    raise ValueError(f"{where} holds an object of type {type(value).__name__}")


def _check_progress(state, path):
    """What is read of a checkpoint's progress has to be there."""
    history, extra = state.get("optimizer_history"), state.get("extra_state")
    if not history or not all(isinstance(entry, dict) for entry in history) or extra is None:
        raise ValueError(f"{path} is {NOT_OURS}")
    if type(history[-1].get("num_updates")) is not int:
        raise ValueError(f"{path} refused: its number of updates is {shorten(history[-1].get('num_updates'))}")
    meters, labels = extra.get("metrics", {}), (state.get("task_state") or {}).get("labels", {})
    correct = {
        "extra_state.train_iterator": isinstance(extra.get("train_iterator", {}), dict),
        "extra_state.metrics": isinstance(meters, dict) and all(map(_are_meters, meters.values())),
        "task_state.labels": isinstance(labels, dict) and all(isinstance(names, list) for names in labels.values()),
    }
    if wrong := [name for name, right in correct.items() if not right]:
        raise ValueError(f"{path} refused: {wrong[0]} is not what a training writes")


def _are_meters(entries):
    return isinstance(entries, list) and all(
        isinstance(entry, (list, tuple)) and len(entry) == 4 and entry[2] in METERS for entry in entries
    )


# ------------------------------------------------------------------------------------------- where fairseq itself reads


class Refused(ValueError, SystemExit):
    """A file that does not pass. As a SystemExit it is one line of fairseq's own programs, too."""

    code = property(str)


_trained = None  # the architecture of the run that reads a checkpoint to go on from it


def load_checkpoint_to_cpu(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool = False
) -> dict:
    """fairseq's, through the gate."""
    try:
        state = read_checkpoint(PathManager.get_local_path(path), trained=_trained)
    except ValueError as error:
        raise Refused(str(error)) from None
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
