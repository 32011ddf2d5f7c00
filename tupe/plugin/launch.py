"""A recipe of configs/ and the user's options -> the configuration of fairseq -> training in this process. The commands
are in `tupe/cli/train.py`."""

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fairseq.distributed import utils as distributed_utils
from fairseq.utils import import_user_module
from fairseq_cli import train as fairseq_train  # sets up logging, as fairseq-train does
from omegaconf import DictConfig

from ..checkpoints.trained import read_model
from ..common.active import refuse
from ..common.recipes import Settings
from ..config import flag
from ..encoder import Encoder
from ..run.progress import SECONDS_WITHOUT_PROGRESS
from ..run.stop import stoppable
from . import patches
from .model import core_config, load_scheme_files
from .recorded import recorded, true_reason
from .saving import check_start
from .settings import configuration, dataclasses_of

logger = logging.getLogger("tupe.launch")
patches.apply(patches.IN_TRAINING)
patches.apply(patches.BY_TUPE)

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
    return command, partial(train, configuration(values))


def training_options(
    settings: Settings, data: Path | str, processes: int = 1, cuda: bool = True, dry_run: bool = False,
    micro_batch_size: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """{"section.key": value} of fairseq's configuration that makes it follow the settings on `processes` processes:
    their share of the batch, and a precision that the device has. Raises ValueError for a value that fairseq does not
    take, an impossible split, a model that cannot be built, and, but for a dry_run, a checkpoint that is not there."""
    settings = replace(settings, values=dict(settings.values))
    values = settings.values
    user_dir = values.setdefault("common.user_dir", str(Path(__file__).parents[1]))
    if not Path(user_dir).samefile(Path(__file__).parents[1]):
        import_user_module(DictConfig({"user_dir": user_dir}))
    values["task.data"] = str(data)
    settings.split(processes, micro_batch_size)
    for place in ("dataset.batch_size_valid", "dataset.max_valid_steps"):
        if not values.get(place):  # for fairseq 0 is no batch, and not the default
            values.pop(place, None)
    values[WORLD_SIZE] = processes  # else fairseq would use every GPU it sees
    if not cuda:
        values["common.cpu"] = True
        if processes > 1:
            values.setdefault("distributed_training.distributed_backend", "gloo")
            values.setdefault("distributed_training.ddp_backend", "legacy_ddp")
    settings.choose_precision(cuda)
    if not dry_run:
        if checkpoint := values.get("checkpoint.finetune_from_model"):
            read_model(checkpoint, mmap=True)
        check_start(*(values.get(f"checkpoint.{name}") for name in ("restore_file", "continue_once")))
    model = configuration(values).model
    if "position" in model:
        load_scheme_files(model)
        Encoder.check(core_config(model))
    return values


def train(config: DictConfig, yes: bool = False) -> None:
    """Do in this process what `fairseq-train` does with this configuration. yes: however long it takes on a CPU.

    Raises ValueError for a mistake of the user that this package detects, BlockingIOError if another process trains in
    that folder, OSError if the disk is full or read-only, and SystemExit with `record.STOPPED` if a signal stopped it.
    Any other error is a `Refusal`, see `active.refuse`.
    """
    try:
        with recorded(yes), stoppable():
            distributed_utils.call_main(config, fairseq_train.main)
    except Exception as error:
        refuse(true_reason(error))


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
