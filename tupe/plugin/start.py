"""What every run settles and says before it begins, whichever command started it."""

import logging
import os

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .. import config as schema
from ..common import record
from ..common.options import CONFIGS
from ..common.recipes import compose

logger = logging.getLogger("tupe.launch")


class Refused(ValueError, SystemExit):
    """A start that is refused before anything is written. fairseq-train ends with this status too."""

    code = record.REFUSED


def under_hydra(config: DictConfig | FairseqConfig) -> bool:
    """Whether fairseq-hydra-train made a configuration; also in a process that it spawned, where Hydra does not run."""
    return HydraConfig.initialized() or "job_logging_cfg" in config


class NoGPU(ValueError, SystemExit):
    """--fp16 on a CPU. As a SystemExit it is one line of fairseq-train too."""

    code = schema.NO_GPU


def choose_precision(config: DictConfig | FairseqConfig) -> None:
    """Under Hydra, train in float32 without a GPU: its recipes, the same on all machines, say fp16. Raises
    NoGPU where the user says so, ValueError for a model that fp16 cannot train. config: the whole configuration."""
    common = config.common
    on_gpu = torch.cuda.is_available() and not common.cpu
    if common.fp16 and on_gpu and getattr(config.model, "normaliser", "") == "exp":
        raise ValueError("normaliser exp overflows under --fp16; valid: --autocast bf16, or float32")
    if not common.fp16 or on_gpu:
        return
    if not HydraConfig.initialized():
        raise NoGPU(schema.NO_GPU)
    logger.warning("no GPU: common.fp16=false common.cpu=true")
    common.fp16, common.cpu = False, True


SIZE, STEPS = "dataset.batch_size", "optimization.update_freq"


def split_over_processes(config: DictConfig) -> None:
    """Under Hydra, train with all processes together on the batch of a recipe, which is written for one process: the
    split is that of `tupe`. What is typed beside the recipe is of a process, as fairseq's, if both the size of a batch
    and the number of steps are typed. config: the whole configuration.

    Raises Refused if there is no such split; if only one of the two is typed, and the batch would not be the recipe's;
    for a batch of fewer tokens than a sequence has; and for processes of torchrun that would train one by one.
    """
    data, parallel, steps = config.dataset, config.distributed_training, config.optimization.update_freq[0]
    processes, size = parallel.distributed_world_size, data.batch_size
    length = (config.get("task") or {}).get("tokens_per_sample") or 0
    try:
        if data.max_tokens and data.max_tokens < length:  # on which fairseq ends in an AssertionError
            raise ValueError(f"--max-tokens is {data.max_tokens}: a sequence has {length}; valid: at least {length}")
        if processes == 1 < (others := int(os.environ.get("WORLD_SIZE", "1"))):  # at which fairseq then does not look
            names = "--distributed-world-size, or distributed_training.distributed_world_size of Hydra"
            raise Refused(f"each of torchrun's {others} processes would train on its own: {names}, is 1; give {others}")
        if processes == 1 or not under_hydra(config):
            return
        recipe, typed = words_of_hydra()
        if typed & {SIZE, "dataset.max_tokens"} and STEPS in typed:
            return
        if typed & {SIZE, "dataset.max_tokens", STEPS}:
            check_product(config, recipe, typed)
            return
        both = f"type {SIZE}=N and {STEPS}=[M], which are of a process"
        data.batch_size, steps = schema.split_batch(size * steps, processes, size, both)
    except ValueError as error:
        if distributed_utils.is_master(parallel):
            logger.error(error)  # fairseq-train ends without it
        raise Refused(str(error)) from None
    config.optimization.update_freq = [steps]
    if "dataset.batch_size_valid" not in typed:
        same_text = data.max_valid_steps and size % processes == 0  # held-out losses are of it on any machine
        data.batch_size_valid = size // processes if same_text else data.batch_size
    if distributed_utils.is_master(parallel):
        logger.warning(f"the recipe's batch on {processes} processes: {SIZE}={data.batch_size} {STEPS}=[{steps}]")


def words_of_hydra() -> tuple[str | None, set[str]]:
    """(name of the recipe, names of what is typed beside it). What fairseq has spawned has the words in sys.argv."""
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        recipe, words = hydra.job.config_name, hydra.overrides.task
    else:
        recipe, words = (found := get_args()).config_name, found.overrides
    return recipe, {word.lstrip("+").partition("=")[0] for word in words}


def check_product(config: DictConfig, recipe: str | None, typed: set[str]) -> None:
    """Raise ValueError for a batch of which only one factor is typed, unless it is the recipe's."""
    processes, size = config.distributed_training.distributed_world_size, config.dataset.batch_size
    steps, whole = config.optimization.update_freq[0], None
    if recipe and (CONFIGS / f"{recipe}.yaml").is_file() and "dataset.max_tokens" not in typed:
        values = compose(recipe)
        whole = values[SIZE] * values[STEPS][0]
        if size * steps * processes == whole:
            return
    by_steps = STEPS in typed
    given, other = (STEPS, SIZE) if by_steps else (SIZE if SIZE in typed else "dataset.max_tokens", STEPS)
    said = f"{given} is typed, and {other} is the recipe's, for one process: on {processes}, type both"
    if whole is not None:
        product = size * steps * processes
        said += f"; {size} x {steps} x {processes} = {product} sequences an update, in {recipe} {whole}"
        rest, left = divmod(whole, (steps if by_steps else size) * processes)
        said += "" if left else f": {other}={rest if by_steps else [rest]}"
    raise ValueError(said)


def describe(config: DictConfig) -> None:
    """Log what an update trains on, and warn of a warm-up as long as the run. config: the whole configuration."""
    data, length, warmup = config.dataset, config.optimization, config.lr_scheduler.get("warmup_updates") or 0
    steps, processes = length.update_freq[0], config.distributed_training.distributed_world_size
    split = f"{steps} step{'s' * (steps != 1)} x {processes} process{'es' * (processes != 1)}"
    if data.batch_size and not data.max_tokens:
        logger.info(f"an update: {data.batch_size * steps * processes} sequences = {data.batch_size} x {split}")
    else:
        sequences = f" and {data.batch_size} sequences" if data.batch_size else ""
        logger.info(f"an update: at most {data.max_tokens} tokens{sequences} x {split}")
    if length.max_epoch > 0 and config.lr_scheduler._name == "polynomial_decay":
        logger.warning(
            f"the rate falls until update {config.lr_scheduler.total_num_update:.0f}, whatever --max-epoch "
            f"{length.max_epoch} is; --max-update chooses the end of both"
        )
    if 0 < length.max_update <= warmup:
        last = length.lr[0] * length.max_update / warmup
        logger.warning(
            f"a warm-up of {warmup} updates in a run of {length.max_update}: the learning rate only rises, to "
            f"{last:.3g}; --warmup-updates chooses another"
        )
