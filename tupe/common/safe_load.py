"""Reading what others have saved without running code from it. Needs only torch, and transformers for its models."""

import argparse
import codecs
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..encoder import names_in
from ..run.checksums import check
from .options import shorten

NOT_OURS = (
    "no checkpoint of this project: it holds no configuration or no model (`tupe checkpoint convert` makes one of what "
    "the released TUPE code wrote)"
)
# What is read of the config.json of a model of ours, beside the options of `ModelConfig`. Nothing else reaches
# transformers, which takes code (`auto_map`), kernels (`attn_implementation`) and formats of numbers from there.
SETTINGS = {
    "model_type": str, "architectures": list, "vocab_size": int, "bos_token_id": int, "pad_token_id": int,
    "eos_token_id": int, "classifier_inner": int, "classifier_name": str, "id2label": dict, "label2id": dict,
    "problem_type": str, "label_range": list,
}  # fmt: skip
# What fairseq's checkpoints hold beside tensors and plain Python: the options of parts without a dataclass, and a numpy
# number as the best score, by both names, so that either numpy loads what the other one wrote. `encode`: how pickle
# writes bytes.
HARMLESS = [
    argparse.Namespace, codecs.encode, np.dtype, *(type(np.dtype(name)) for name in ("float64", "float32", "int64")),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]  # fmt: skip
# fairseq 0.9 pickled its progress meters into checkpoints, as objects of a module that is gone. Classes of the same
# names that only hold data stand in for them; nothing of fairseq runs.
OLD_METERS = [
    type(name, (), {"__module__": "fairseq.meters"}) for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


def load_safely(path: str | Path, mmap: bool = False) -> Any:
    """The contents of a checkpoint of this project, of fairseq, or of the released TUPE code, on the CPU.

    Only tensors and plain data are read: a file that asks for anything else is refused with a ValueError, and nothing
    of it is run. mmap: leave the tensors on disk until they are used, where the file's format allows it.
    """
    allowed = list(torch.serialization.get_safe_globals())  # torch's own context manager would forget those in HARMLESS
    torch.serialization.add_safe_globals([*HARMLESS, *OLD_METERS])
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise ValueError(f"checkpoint not found: {path}") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported (?:global|class|operand))[: ]+(\S+( \S+)?)", str(error))
        what = f" ({named.group(1).rstrip('.')})" if named else ""
        raise ValueError(
            f"{path} refused: not a checkpoint, or it contains objects other than tensors and plain data{what}"
        ) from error
    except Exception as error:  # reading a damaged pickle can fail in any way
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def tensors_of(state: Any, path: str | Path) -> dict[str, torch.Tensor]:
    """The model in the contents of the file `path`. Raises ValueError if it is anything but tensors with names."""
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not model:
        raise ValueError(f"{path} has no model: not a checkpoint")
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{path} refused: its model holds a {type(value).__name__}, not tensors with names alone")
    return dict(model)


def read_config(path: str | Path) -> dict:
    """A config.json of a Hugging Face folder; of a model of ours, what is known here alone. Raises
    ValueError, naming it, if it is no JSON object, or has a value of another type."""
    check(path)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    if config.get("model_type") != "tupe":
        return config
    known = {*SETTINGS, *names_in("hugging_face").values()}
    config = {name: value for name, value in config.items() if name in known and value is not None}
    for name, kind in SETTINGS.items():
        if type(config.get(name, kind())) is not kind:
            raise ValueError(f"{path}: {name} is {shorten(config[name])}; valid: {kind.__name__}")
    if not all(str(number).isdecimal() for number in config.get("id2label", ())):
        raise ValueError(f"{path}: id2label is {shorten(config['id2label'])}; valid: {{number: name}}")
    if (known := config.get("label_range")) and [type(bound) in (int, float) for bound in known] != [True, True]:
        raise ValueError(f"{path}: label_range is {shorten(known)}; valid: [least, greatest]")
    return config


def num_updates(state: dict) -> int:
    """Updates after which a checkpoint was written."""
    return state["optimizer_history"][-1]["num_updates"]
