"""The checkpoint that a run starts from: its dictionary, and the structure of its model, which fine-tuning keeps."""

import logging
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path

from fairseq import models
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf, open_dict

from ..checkpoints.trained import (
    FINGERPRINT,
    SETTINGS,
    Trained,
    check_dictionary,
    pack_settings,
    read_model,
    settings_of,
)
from ..data.splits import read_symbols
from ..encoder import LMHead
from ..names import cls_beside
from ..positions import canonical
from ..text import MASK
from .model import TUNABLE, TupeConfig, TupeModel, redefault, spell_names

logger = logging.getLogger(__name__)


def load_dictionary(path: str | Path) -> Dictionary:
    """dict.txt with <mask> added, as in fairseq's task masked_lm. Raises ValueError as `read_symbols` does."""
    read_symbols(Path(path).parent)
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol(MASK)
    return dictionary


def contradictions(saved: Mapping, model_cfg: Mapping) -> list[str]:
    """What a model's structure and that of a checkpoint differ in."""
    return [
        f"{key}={value} in the checkpoint, {model_cfg[key]} here"
        for key, value in structure(saved).items()
        if key in model_cfg and str(model_cfg[key]) != str(value)
    ]


def adopt_structure(
    model_cfg: DictConfig, path: str | Path, data: str | Path, length: int | None = None
) -> tuple[DictConfig, Trained]:
    """The configuration of a model that starts from the checkpoint `path` and keeps its structure and longest input;
    or takes `length`, see `Trained.longest`.

    model_cfg: a section of the whole configuration, which is updated too; its options are those of `from_checkpoint` or
    of an architecture. data: folder with the dict.txt. Returns (configuration, the checkpoint's model). Raises
    ValueError if the configuration or the dictionary contradicts the checkpoint.
    """
    trained = read_model(path, mmap=True)
    saved = trained.options()
    check_dictionary(trained.weights, Path(data) / "dict.txt")
    if "position" in model_cfg:
        spell_names(model_cfg)
    if wrong := contradictions(saved, model_cfg):
        raise ValueError(
            f"the model contradicts the checkpoint {path} (architecture {saved['_name']}): {'; '.join(wrong)}"
        )
    if model_cfg._name == FROM_CHECKPOINT:
        chosen = {key: value for key, value in model_cfg.items() if key in TUNABLE}
        whole = model_cfg._get_parent()
        with open_dict(whole):
            whole.model = {**chosen, **structure(saved), "_name": saved["_name"]}
        OmegaConf.set_struct(whole.model, True)
        model_cfg = whole.model
    with open_dict(model_cfg):
        model_cfg.max_positions = trained.longest(length or 0)
    return model_cfg, trained


def as_checkpoint(folder: str | Path) -> dict:
    """A folder of transformers as a checkpoint of fairseq's, from which training starts."""
    trained = read_model(folder)
    weights = {**trained.weights, SETTINGS: pack_settings(settings_of(trained.config))}
    if "lm_head.bias" not in weights:
        logger.warning(f"{folder} has no language-model head; a new one is initialised")
        fresh = LMHead(trained.config.width, trained.types, config=trained.config).state_dict()
        weights |= {f"lm_head.{key}": value for key, value in fresh.items()}
    if FINGERPRINT not in weights:
        raise ValueError(f"{folder} has no dict.txt; copy that of the model's pre-training data there")
    begin = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None}
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": trained.updates}
    return {
        "args": None, "cfg": {"model": trained.options(), "task": trained.task}, "model": weights,
        "optimizer_history": [history], "extra_state": begin, "last_optimizer_state": None,
    }  # fmt: skip


def structure(model_cfg: Mapping) -> dict:
    """The settings of a model that define what it computes."""
    own = {key: value for key, value in model_cfg.items() if key not in TUNABLE and not key.startswith("_")}
    if own.get("position"):  # older checkpoints have it as it was typed, and so have architectures
        own["position"] = canonical(own["position"])
        if str(own.get("cls")) == "auto":
            own["cls"] = cls_beside(own["position"])
    return own


def variant(model_cfg: Mapping) -> str:
    """How a model differs from the preset of its architecture: "", or "position sinusoidal, ..."."""
    preset = models.MODEL_DATACLASS_REGISTRY[model_cfg["_name"]]()
    own, plain = structure(model_cfg), structure(vars(preset))
    return ", ".join(f"{key} {own[key]}" for key in sorted(own) if str(own[key]) != str(plain[key]))


FROM_CHECKPOINT = "from_checkpoint"
free_fields = [
    (name, field.type, redefault(TupeConfig, name, field.default))
    for name, field in TupeConfig.__dataclass_fields__.items()
    if name in TUNABLE and name != "max_positions"
]
FromCheckpointConfig = make_dataclass(
    "FromCheckpointConfig", free_fields, bases=(FairseqDataclass,), namespace={"__module__": __name__}
)


@models.register_model(FROM_CHECKPOINT, dataclass=FromCheckpointConfig)
class FromCheckpoint(TupeModel):
    """The architecture `from_checkpoint` stands for that of the checkpoint to start from. The tasks of this plugin
    replace it before they build the model (`adopt_structure`), so that new checkpoints have the real name."""

    @classmethod
    def build_model(cls, cfg: DictConfig, task: FairseqTask) -> TupeModel:
        raise ValueError(f"{FROM_CHECKPOINT} needs --finetune-from-model and a task of this plugin")
