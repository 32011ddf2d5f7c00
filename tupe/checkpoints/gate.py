"""The gate: every checkpoint of fairseq's form comes in through `read_checkpoint`, whichever command asks for it,
fairseq included. (Weights alone, and the state of the second engine, come through `load_safely`.)

To unpickle safely is not enough: fairseq builds whatever model, task and criterion a checkpoint's configuration names,
and many of its parts `eval` their options. So only parts that are ours, or that our recipes use, pass by name, each
with the options that it has, of the types that they have. Whatever else a file holds is left out, or the file is
refused; what is read here, and what is written from it, is plain data. Reading needs no fairseq.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.architectures import names, preset
from ..common.options import shorten
from ..common.safe_load import NOT_OURS, load_safely, tensors_of
from ..config import COMPILE
from ..encoder import ModelConfig, names_in
from ..names import ELECTRA, split_size
from ..run.checksums import check

# {option: its type, or its choices}. Other sections of a configuration are not read.
RUNNING = {"autocast": ("none", "bf16"), "position_file": str, "compile": COMPILE}
MODEL = {names_in("fairseq")[f.name]: f.metadata["choices"] or f.type for f in fields(ModelConfig)} | RUNNING
COMMON = dict.fromkeys(("fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16"), bool) | {"seed": int}
SHORTEN = {"shorten_method": ("none", "truncate", "random_crop"), "shorten_data_split_list": str}
MASKED_LM = {
    "data": str, "sample_break_mode": ("none", "complete", "complete_doc", "eos"), "tokens_per_sample": int,
    "mask_prob": float, "leave_unmasked_prob": float, "random_token_prob": float, "freq_weighted_replacement": bool,
    "mask_whole_words": bool, "mask_multiple_length": int, "mask_stdev": float, **SHORTEN, "seed": int,
    "include_target_tokens": bool, "include_index": bool, "skip_masking": bool, "d2v2_multi": bool,
}  # fmt: skip
OURS = {"finetune_from_model": str}
PRETRAINING = {
    "data": str, "sample_break_mode": ("complete",), "tokens_per_sample": int, "mask_prob": float,
    "leave_unmasked_prob": float, "random_token_prob": float, "seed": int, **OURS,
}  # fmt: skip
# What a checkpoint chooses by name, and fairseq then builds: ours, and those of fairseq's that recipes use. A package
# that stands on ours adds its own.
ADMITTED = {
    "task": {
        "masked_lm": MASKED_LM, "tupe_masked_lm": PRETRAINING,
        "glue": {
            **OURS, "seed": int, "data": str, "glue_task": str, "classification_head_name": str,
        },
        "sentence_prediction": {
            "data": str, "num_classes": int, "init_token": int, "separator_token": int, "no_shuffle": bool, **SHORTEN,
            "add_prev_output_tokens": bool, "max_positions": int, "regression_target": bool,
            "classification_head_name": str, "seed": int, "d2v2_multi": bool,
        },
    },
    "criterion": {
        "masked_lm": {"tpu": bool}, "masked_lm_chunked": {"tpu": bool}, "electra": {"discriminator_weight": float},
        "glue": {"classification_head_name": str},
        "sentence_prediction": {
            "classification_head_name": str, "regression_target": bool, "report_mcc": bool, "report_acc_and_f1": bool,
            "report_pearson_and_spearman": bool,
        },
    },
    "model": {
        name: MODEL | ({"generator_fraction": int} if split_size(name)[0] in ELECTRA else {}) for name in names()
    },
}  # fmt: skip
REST = {  # what a checkpoint holds beside its configuration and its model -> its types
    "criterion": (dict, type(None)), "optimizer_history": list, "task_state": (dict, type(None)), "extra_state": dict,
    "last_optimizer_state": (dict, type(None)),
}  # fmt: skip
METERS = ("AverageMeter", "SumMeter", "TimeMeter", "StopwatchMeter", "ConcatTensorMeter")  # fairseq calls them by name


def read_checkpoint(path: str | Path, mmap: bool = False, trained: str | None = None) -> dict:
    """The contents of a checkpoint of this project, on the CPU, as plain data and tensors.

    mmap: leave the tensors on disk until they are used, where the file's format allows it. trained: the architecture of
    the run that goes on from it. Such a run builds all its parts from its own configuration; if that is none of ours,
    the checkpoint's may be another one, too, and of parts of others only the name is read.
    Raises ValueError, with one line, for anything else.
    """
    check(path)
    return admit(load_safely(path, mmap), path, trained)


def admit(state: Any, path: str | Path, trained: str | None = None) -> dict:
    """What `read_checkpoint` returns, of the contents of the file `path`."""
    cfg = state.get("cfg") if isinstance(state, dict) else None
    if not cfg or not isinstance(cfg, dict) or "model" not in state:
        raise ValueError(f"{path} is {NOT_OURS}")
    configuration = {part: _part(part, cfg.get(part), path, trained) for part in ADMITTED}
    configuration["common"] = _options(COMMON, cfg.get("common") or {}, f"{path} refused: cfg.common")
    admitted = {"args": None, "cfg": configuration, "model": tensors_of(state, path)}
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


def _part(part, options, path, trained):
    """A section that chooses a part of fairseq by its name."""
    if not isinstance(options, dict):  # a part without a dataclass has a Namespace; none of ours is such a part
        options = vars(options) if hasattr(options, "arch") else {}
    name = options.get("_name") or options.get("arch")
    if part == "criterion" and not options:
        return None
    if not isinstance(name, str):
        raise ValueError(f"{path} is {NOT_OURS}")
    if name not in ADMITTED[part]:
        if trained is not None and (part != "model" or trained not in ADMITTED["model"]):
            return {"_name": name}
        raise ValueError(
            f"{path} is no checkpoint of this project: its {part} is {shorten(name)}, which fairseq alone reads, where "
            "tupe is not imported"
        )
    admitted = {"_name": name, **_options(ADMITTED[part][name], options, f"{path} refused: cfg.{part}")}
    if part == "model":
        if not {"position", "max_positions"} <= admitted.keys():
            raise ValueError(f"{path} is {NOT_OURS}")
        admitted = {**_defaults(name), **admitted}
    return admitted


def _defaults(architecture):
    """What an older checkpoint does not say of its model."""
    theirs = names_in("fairseq")
    own = {theirs[f.name]: f.default for f in fields(ModelConfig)}
    running = {"autocast": "none", "position_file": "", "compile": "auto"}
    return {**running, **own, **{theirs[option]: value for option, value in preset(architecture).items()}}


def _options(known, options, where):
    """The known options out of those given. Others are of other versions, or put there for somebody else."""
    if not isinstance(options, dict):
        raise ValueError(f"{where} is a {type(options).__name__}, not a section")
    admitted = {}
    for name, kind in known.items():
        if name in options and options[name] != "???":  # which is how omegaconf writes one that is missing
            value = _plain(options[name], f"{where}.{name}")
            if not _fits(value, kind):
                valid = kind.__name__ if isinstance(kind, type) else ", ".join(kind)
                raise ValueError(f"{where}.{name} is {shorten(value)}; valid: {valid}")
            admitted[name] = value
    return admitted


def _fits(value, kind):
    """Whether a value is of a type, or one of the choices. Text must not refer to what omegaconf would look up."""
    if value is None or not isinstance(kind, type):
        return value is None or value in kind
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind and not (kind is str and "${" in value)


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
