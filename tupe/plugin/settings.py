"""The settings of a training as fairseq's configuration, and what a run's record keeps of that: the settings that are
not the default. What each of ours means there is in `tupe/config.py`."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..common.options import did_you_mean, split_files
from ..config import APART, PLACES
from ..run.folder import fingerprint
from .model import TUNABLE, spell_names

REGISTERED = {"task": TASK_DATACLASS_REGISTRY, "model": MODEL_DATACLASS_REGISTRY}
REGISTERED |= {name: known["dataclass_registry"] for name, known in REGISTRIES.items()}


DEFAULTS = {f"{name}._name": known["default"] for name, known in REGISTRIES.items()}


def dataclasses_of(values: Mapping[str, Any]) -> dict[str, type | None]:
    """{section: the dataclass of fairseq's that says what it holds}; None for a part that is not chosen, or that takes
    its options from a command line."""
    chosen, found = {**DEFAULTS, **values}, {}
    for section, own in FairseqConfig.__dataclass_fields__.items():
        found[section] = REGISTERED[section].get(chosen.get(f"{section}._name")) if section in REGISTERED else own.type
    del found["_name"]
    return found


def configuration(values: Mapping[str, Any]) -> DictConfig:
    """What fairseq makes of these settings (a test compares them), without its parser and Hydra's, which take seconds.
    values: {"section.key": value}. Raises ValueError for a section, a key or a value that fairseq does not have."""
    values = {**{place: name for place, name in DEFAULTS.items() if name is not None}, **values}
    sections = dataclasses_of(values)
    config = OmegaConf.create({"_name": None})
    for section, kind in sections.items():
        config[section] = None if kind is None else OmegaConf.structured(kind)
    for place, value in values.items():
        section, _, key = place.partition(".")
        if section not in sections:
            raise ValueError(f"{place}={value}: no section {section!r}{did_you_mean(section, sections)}")
        if sections[section] is None:
            raise ValueError(f"{place}={value}: unknown{did_you_mean(values[f'{section}._name'], REGISTERED[section])}")
        try:
            config[section][key] = value
        except OmegaConfBaseException as error:
            near = "" if key in config[section] else did_you_mean(key, config[section])
            raise ValueError(f"{place}={value}: {str(error).splitlines()[0]}{near}") from None
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    OmegaConf.set_struct(config, True)
    return config


# ------------------------------------------------------------------------------------------------ what a record keeps

NAMED = ("task", "model", "criterion", "optimizer", "lr_scheduler")
SECTIONS = ("common", "dataset", "optimization", "checkpoint", *NAMED)
LEFT_OUT = {place for place, option in PLACES.items() if option.record == APART} | {"common.user_dir", "task.data"}
LEFT_OUT -= {"task.glue_task"}  # which records of this engine have named from the first on


def settings(config: DictConfig) -> dict[str, tuple]:
    """{"section.key": (value, default)} of every setting of training, as in JSON. config: the whole configuration.

    Batches are those of all processes: `update_freq` is given times their number, and so is the size of a batch of
    held-out text where only some are scored. A file of position schemes stands for its contents, and the structure of a
    model that starts from a checkpoint is that checkpoint's.
    """
    found, kinds = {}, dataclasses_of({f"{name}._name": config[name]._name for name in NAMED})
    for section in SECTIONS:
        for key, default in _defaults(section, kinds[section]).items():
            if f"{section}.{key}" not in LEFT_OUT:
                if str(default).startswith("${"):  # the value of another setting
                    default = OmegaConf.select(config, default[2:-1])
                found[f"{section}.{key}"] = plain(getattr(config[section], key)), plain(default)
    processes = distributed_utils.get_global_world_size()
    found["distributed_training.distributed_world_size"] = processes, 1

    freq = found["optimization.update_freq"][0]
    found["optimization.update_freq"] = [processes * steps for steps in freq], [1]
    if len(found["optimization.lr"][0]) == 1:
        del found["optimization.lr"]  # `Record.lr`
    for key in ("batch_size_valid", "max_tokens_valid"):
        found[f"dataset.{key}"] = processes * (config.dataset[key] or 0) * bool(config.dataset.max_valid_steps), 0
    if files := split_files(found.get("model.position_file", ("", ""))[0] or ""):
        found["model.position_file"] = fingerprint(files), ""
    if config.checkpoint.finetune_from_model:
        taken = {f"model.{key}" for key in config.model if key not in TUNABLE or key == "max_positions"}
        found = {name: pair for name, pair in found.items() if name not in taken}
    return found


def _defaults(section, kind):
    """{key: default} of a section; of a part without a dataclass, its name alone is known."""
    defaults = {"_name": None} if section in NAMED else {}
    if kind is None:
        return defaults
    own = kind()
    if hasattr(own, "position"):
        spell_names(own)
    return {key: value for key, value in vars(own).items() if key[0] != "_"} | defaults


def plain(value: Any) -> Any:
    """A value as JSON has it; "(0.9, 0.999)" is a list, however it is spaced."""
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, str) and value[:1] in ("(", "["):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    value = list(value) if isinstance(value, tuple) else value
    return value if isinstance(value, (int, float, list, dict)) or value is None else str(value)
