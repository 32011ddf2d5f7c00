"""The checkpoint that a run starts from: its dictionary, and the structure of its model, which fine-tuning keeps."""

from pathlib import Path

import torch
from fairseq import models
from fairseq.data import Dictionary

from ..safe_load import num_updates, read_checkpoint
from .model import FREE, dictionary_fingerprint

MASK = "<mask>"

def load_dictionary(path: str | Path) -> Dictionary:
    """dict.txt with <mask> added, as fairseq's task masked_lm does."""
    if not Path(path).is_file():
        raise ValueError(f"there is no dictionary {path}; give the dict.txt that the model was trained with")
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol(MASK)
    return dictionary


def check_dictionary(state: dict, path: str | Path) -> None:
    """Raise ValueError unless the dict.txt `path` is the one that a checkpoint's model was trained with."""
    dictionary, types = load_dictionary(path), len(state["model"]["encoder.tokens.weight"])
    if len(dictionary) != types:
        raise ValueError(
            f"{path} makes {len(dictionary)} types, the model has {types}: another model's dictionary; take the "
            "dict.txt of its own pre-training data"
        )
    fingerprint = dictionary_fingerprint(dictionary)
    if not torch.equal(state["model"].get("_extra_state", fingerprint), fingerprint):
        raise ValueError(f"{path} has as many types as the model's dictionary, but other ones or in another order")


def adopt_structure(model_cfg, path, data):
    """Compare a model configuration, and the dict.txt of the folder `data`, with the checkpoint to start from, and take
    over its `max_positions`.

    Returns {"pretrained": path, "pretrained_updates": of pre-training, "variant": see `variant`}. Raises ValueError if
    they contradict each other.
    """
    state = read_checkpoint(path, mmap=True)
    saved = state["cfg"]["model"]
    wrong = [
        f"{key}={value} in the checkpoint, {model_cfg[key]} here"
        for key, value in structure(saved).items()
        if key in model_cfg and str(model_cfg[key]) != str(value)
    ]
    if wrong:
        raise ValueError(
            f"the model contradicts the checkpoint {path} (architecture {saved['_name']}): {'; '.join(wrong)}"
        )
    check_dictionary(state, Path(data) / "dict.txt")
    model_cfg.max_positions = saved["max_positions"]
    where = str(Path(path).resolve())
    return {"pretrained": where, "pretrained_updates": num_updates(state), "variant": variant(saved)}


def model_options(path):
    """A checkpoint's architecture and the fairseq-train options that rebuild it: ["tupe_r", "--position=...", ...]."""
    saved = read_checkpoint(path, mmap=True)["cfg"]["model"]
    return [saved["_name"], *(f"--{key.replace('_', '-')}={value}" for key, value in structure(saved).items())]


def structure(model_cfg):
    """The settings of a model that define its function."""
    return {key: value for key, value in model_cfg.items() if key not in FREE and not key.startswith("_")}


def variant(model_cfg):
    """How a model differs from what its architecture's name stands for: "", or "position sinusoidal, ..."."""
    preset = models.MODEL_DATACLASS_REGISTRY[model_cfg["_name"]]()
    own = structure(model_cfg)
    return ", ".join(f"{key} {own[key]}" for key in sorted(own) if str(own[key]) != str(getattr(preset, key)))
