"""What a run's record keeps of fairseq's whole configuration: the settings that are not the default."""

import argparse
import ast
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from fairseq import models, registry
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf

from ..common.options import split_files
from ..common.record import fingerprint
from .model import TUNABLE, spell_names

SECTIONS = ("common", "dataset", "optimization", "checkpoint", "bmuf", "ema")  # and what has a name:
NAMED = ("task", "model", "criterion", "optimizer", "lr_scheduler")
# In a field of the record, or only of one process.
LEFT_OUT = {
    "common.seed", "common.user_dir", "dataset.valid_subset", "optimization.max_epoch", "optimization.max_update",
    "checkpoint.save_dir", "checkpoint.finetune_from_model", "task.data", "task._name", "model._name",
}  # fmt: skip
# Of the section on how processes work together, in which all else leaves the numbers as they are.
DISTRIBUTED = ("ddp_comm_hook", "slowmo_momentum", "slowmo_base_algorithm", "localsgd_frequency")
RESTORE = "checkpoint.restore_file"


def settings(config: DictConfig) -> dict[str, tuple]:
    """{"section.key": (value, default)} of every setting of training, as in JSON. config: the whole configuration.

    Batches are those of all processes: `update_freq` is given times their number, and so is the size of a batch of
    held-out text where only some are scored. A file of position schemes stands for its contents. A checkpoint of the
    run's own folder is no other place to start from than the default, and the structure of a model that starts from a
    checkpoint is that checkpoint's.
    """
    found = {}
    for section in SECTIONS + NAMED:
        values, defaults = config[section], _defaults(section, config[section])
        values = values if OmegaConf.is_config(values) or values is None else vars(values)
        for key, default in defaults.items() if values is not None else ():
            if f"{section}.{key}" not in LEFT_OUT and key in values:
                if str(default).startswith("${"):  # the value of another setting
                    default = OmegaConf.select(config, default[2:-1])
                found[f"{section}.{key}"] = plain(values[key]), plain(default)
    processes = distributed_utils.get_global_world_size()
    defaults = _defaults("distributed_training", None)
    for key in DISTRIBUTED:
        found[f"distributed_training.{key}"] = plain(config.distributed_training[key]), plain(defaults[key])
    found["distributed_training.distributed_world_size"] = processes, 1

    freq = found["optimization.update_freq"][0]
    found["optimization.update_freq"] = [processes * steps for steps in freq], [1]
    if len(found["optimization.lr"][0]) == 1:
        del found["optimization.lr"]  # `Record.lr`
    for key in ("batch_size_valid", "max_tokens_valid"):
        found[f"dataset.{key}"] = processes * (config.dataset[key] or 0) * bool(config.dataset.max_valid_steps), 0
    if files := split_files(found.get("model.position_file", ("", ""))[0] or ""):
        found["model.position_file"] = fingerprint(files), ""
    folder, restored = Path(config.checkpoint.save_dir).resolve(), Path(config.checkpoint.restore_file)
    own = config.checkpoint.restore_file == "checkpoint_last.pt" or restored.resolve().parent == folder
    found[RESTORE] = (None if own else str(restored.resolve())), None
    if config.checkpoint.finetune_from_model:
        taken = {f"model.{key}" for key in config.model if key not in TUNABLE or key == "max_positions"}
        found = {name: pair for name, pair in found.items() if name not in taken}
    return found


def _defaults(section, values):
    """{key: default} of the settings of a section; of a part without a dataclass, of its options."""
    if section not in NAMED:
        return vars(FairseqConfig.__dataclass_fields__[section].type())
    name = getattr(values, "_name", None)
    known = {"task": TASK_DATACLASS_REGISTRY, "model": models.MODEL_DATACLASS_REGISTRY}
    parts = registry.REGISTRIES.get(section, {"dataclass_registry": known.get(section), "registry": {}})
    dataclass, part = parts["dataclass_registry"].get(name), parts["registry"].get(name)
    defaults = {"_name": None}
    if dataclass is not None:
        plain_options = dataclass()
        if section == "model" and hasattr(plain_options, "position"):
            spell_names(plain_options)
        defaults |= {key: value for key, value in vars(plain_options).items() if key[0] != "_"}
    elif hasattr(part, "add_args"):
        parser = argparse.ArgumentParser(add_help=False)
        part.add_args(parser)
        defaults |= {action.dest: action.default for action in parser._actions}
    return defaults


def plain(value: Any) -> Any:
    """A value as JSON has it; "(0.9, 0.999)" is a list, however it is spaced."""
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, str) and value[:1] in ("(", "["):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    value = list(value) if isinstance(value, tuple) else value
    return value if isinstance(value, (int, float, list, dict)) or value is None else str(value)
