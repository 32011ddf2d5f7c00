"""A recipe of configs/ and the user's options -> the configuration of fairseq -> training in this process. The commands
are in `tupe/cli/train.py`."""

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.utils import import_user_module
from omegaconf import DictConfig

from ..checkpoints.trained import read_model
from ..common.options import split_files
from ..common.recipes import ARCH, Settings
from ..config import flag
from ..data.glue import check_glue, glue_name
from ..data.splits import Split, folders_of, prefixes_of, read_symbols
from ..encoder import Encoder
from ..positions import load_scheme_file
from . import worker
from .model import TupeConfig, core_config
from .saving import check_start
from .settings import configuration, dataclasses_of

logger = logging.getLogger("tupe.launch")

SECONDS_WITHOUT_PROGRESS = 600  # after which processes of several nodes end: one of the nodes may be gone (as for NCCL)
WORLD_SIZE = "distributed_training.distributed_world_size"


def prepare(
    settings: Settings, data: Path, processes: int, gpus: int, dry_run: bool = False,
    micro_batch_size: int | None = None,
) -> tuple[str, Callable[[bool], None]]:  # fmt: skip
    """(the command of fairseq-train that trains as the settings say, the training in this process, which is one of
    `processes`). The training takes `yes`: however long it takes on a CPU.

    gpus: of this node; 0 for the CPU: one process per node, which speak gloo. data: the folder, or several joined by
    ":". dry_run: neither the data nor the run's folder is looked at. micro_batch_size: most sequences of a process
    in one step. Raises ValueError for bad options.
    """
    values = training_options(settings, data, processes, gpus > 0, dry_run, micro_batch_size)
    if processes > max(gpus, 1):
        values.setdefault("distributed_training.heartbeat_timeout", SECONDS_WITHOUT_PROGRESS)
    command = shlex.join(["fairseq-train", *words_of(values)])
    logger.info(command)
    return command, partial(worker.train, configuration(values))


def training_options(
    settings: Settings, data: Path | str, processes: int = 1, cuda: bool = True, dry_run: bool = False,
    micro_batch_size: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """{"section.key": value} of fairseq's configuration that makes it follow the settings on `processes` processes:
    their share of the batch, and a precision that the device has. Raises ValueError for a value that fairseq does not
    take, an impossible split, a model that cannot be built, and, but for a dry_run, a checkpoint that is missing."""
    settings = replace(settings, values=dict(settings.values))
    values = settings.values
    user_dir = values.setdefault("common.user_dir", str(Path(__file__).parents[1]))
    if not Path(user_dir).samefile(Path(__file__).parents[1]):
        import_user_module(DictConfig({"user_dir": user_dir}))
    values["task.data"] = str(data)
    settings.split(processes, micro_batch_size)
    values[WORLD_SIZE] = processes  # else fairseq would use every GPU it sees
    if not cuda:
        values["common.cpu"] = True
        if processes > 1:
            values.setdefault("distributed_training.distributed_backend", "gloo")
            values.setdefault("distributed_training.ddp_backend", "legacy_ddp")
    settings.choose_precision(cuda)
    if values.get("common.bf16"):
        raise ValueError("common.bf16 is for TPUs in fairseq; valid here: --autocast bf16")
    if not dry_run:
        check_start(*(values.get(f"checkpoint.{name}") for name in ("restore_file", "continue_once")))
    configuration(values)
    if folders_of(data)[0].joinpath("dict.txt").is_file():
        check_splits(settings, data)
    check_model(values)
    return values


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of fairseq-train, the data first: "--lr=[0.1]"; a switch as "--fp16" or nothing."""
    words, sections = [values["task.data"]], dataclasses_of(values)
    for place, value in values.items():
        section, _, key = place.partition(".")
        name = key if key != "_name" else "arch" if section == "model" else section
        default = False if key == "_name" else sections[section].__dataclass_fields__[key].default
        if not isinstance(value, bool) and place != "task.data" and value is not None:
            words.append(f"{flag(name)}={value}")
        elif isinstance(value, bool) and value != default:
            words.append(flag(name))
    return words


# ------------------------------------------------------------------------------------------------------ what is refused


def check_model(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint that cannot be read, and for a model that cannot be built: its encoding, its
    sizes. values: {"section.key": value}."""
    if checkpoint := values.get("checkpoint.finetune_from_model"):
        read_model(checkpoint, mmap=True)
    kind = MODEL_DATACLASS_REGISTRY[values[ARCH]]
    if not issubclass(kind, TupeConfig):
        return
    for file in split_files(values.get("model.position_file", "")):
        load_scheme_file(file)
    own = {f.name: values[f"model.{f.name}"] for f in fields_of(kind) if f"model.{f.name}" in values}
    config = core_config(kind(**own))
    try:
        with torch.device("meta"):  # takes no memory
            Encoder(8, 1, 2, **vars(replace(config, layers=1)))
    except (RuntimeError, NotImplementedError) as error:  # a scheme that looks at its numbers
        logger.debug(error)


def check_splits(settings: Settings, data: Path | str) -> None:
    """Raise ValueError if a split that a run reads is not in the data, or not whole."""
    names = [settings["train_subset"]]
    names += [] if settings["disable_validation"] else settings["valid_subset"].split(",")
    folder = folders_of(data)[0]
    for name in names:
        if settings["task"] == "glue":
            check_glue(folder / glue_name(settings["glue_task"], folder), name, labelled=True)
        else:
            for prefix in prefixes_of(data, name):
                Split(prefix, len(read_symbols(folder)))  # raises ValueError for one that is not whole
