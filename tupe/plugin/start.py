"""What a run is told before it begins, whichever command started it: its precision, and what an update trains on."""

import logging
import os

import torch
from fairseq.dataclass.configs import FairseqConfig
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .. import config as schema

logger = logging.getLogger("tupe.launch")

SIZE, STEPS = "dataset.batch_size", "optimization.update_freq"


class Refused(ValueError, SystemExit):
    """A mistake of the user. As a SystemExit it is one line of fairseq's own programs, too."""

    code = property(str)


def choose_precision(config: DictConfig | FairseqConfig) -> None:
    """Under Hydra, train in float32 without a GPU: its recipes, the same on all machines, say fp16. Raises
    Refused where the user says so and for fairseq's amp. config: the whole configuration."""
    common = config.common
    if common.amp:
        raise Refused("common.amp: fairseq divides clipped gradients twice; valid: --fp16, or --autocast bf16")
    on_gpu = torch.cuda.is_available() and not common.cpu
    if not common.fp16 or on_gpu:
        return
    if not HydraConfig.initialized():
        raise Refused(schema.NO_GPU)
    logger.warning("no GPU: common.fp16=false common.cpu=true")
    common.fp16, common.cpu = False, True


def split_over_processes(config: DictConfig) -> None:
    """Under Hydra, train with all processes together on the batch of a recipe, which is written for one process, split
    as `tupe` splits it. Both numbers, typed beside the recipe, are of a process, as fairseq's. config: the whole
    configuration.

    Raises Refused if there is no such split; if only one of the two numbers is typed; for a batch of fewer tokens than
    a sequence has; and for processes of torchrun that would train one by one.
    """
    data, processes = config.dataset, config.distributed_training.distributed_world_size
    length = (config.get("task") or {}).get("tokens_per_sample") or 0
    if 0 < (data.max_tokens or 0) < length:  # on which fairseq ends in an AssertionError
        raise Refused(f"--max-tokens is {data.max_tokens}: a sequence has {length}; valid: at least {length}")
    if processes == 1 < (others := int(os.environ.get("WORLD_SIZE", "1"))):  # at which fairseq then does not look
        names = "--distributed-world-size, or distributed_training.distributed_world_size of Hydra"
        raise Refused(f"each of torchrun's {others} processes would train on its own: {names}, is 1; give {others}")
    if processes == 1 or not (HydraConfig.initialized() or "job_logging_cfg" in config):  # the latter: spawned by it
        return
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else get_args().overrides
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    sizes = typed & {SIZE, "dataset.max_tokens"}
    if sizes and STEPS in typed:
        return
    both = f"type {SIZE}=N and {STEPS}=[M], which are of a process"
    if sizes or STEPS in typed:
        raise Refused(
            f"{' '.join(sizes) or STEPS} is typed, and the rest of the recipe's batch is for one process: {both}"
        )
    size, steps = data.batch_size, config.optimization.update_freq[0]
    try:
        data.batch_size, steps = schema.split_batch(size * steps, processes, size, both)
    except ValueError as error:
        raise Refused(str(error)) from None
    config.optimization.update_freq = [steps]
    if "dataset.batch_size_valid" not in typed:
        same_text = data.max_valid_steps and size % processes == 0  # held-out losses are of it on any machine
        data.batch_size_valid = size // processes if same_text else data.batch_size
    logger.warning(f"the recipe's batch on {processes} processes: {SIZE}={data.batch_size} {STEPS}=[{steps}]")


def describe(config: DictConfig) -> None:
    """Log what an update trains on, and warn of what is likely not meant. config: the whole configuration."""
    data, length, warmup = config.dataset, config.optimization, config.lr_scheduler.get("warmup_updates") or 0
    steps, processes = length.update_freq[0], config.distributed_training.distributed_world_size
    split = f"{steps} step{'s' if steps != 1 else ''} x {processes} process{'es' if processes != 1 else ''}"
    if data.batch_size and not data.max_tokens:
        logger.info(f"an update: {data.batch_size * steps * processes} sequences = {data.batch_size} x {split}")
    else:
        sequences = f" and {data.batch_size} sequences" if data.batch_size else ""
        logger.info(f"an update: at most {data.max_tokens} tokens{sequences} x {split}")
    if 0 < length.max_update <= warmup:
        last = length.lr[0] * length.max_update / warmup
        logger.warning(
            f"a warm-up of {warmup} updates in a run of {length.max_update}: the learning rate only rises, to "
            f"{last:.3g}; --warmup-updates chooses another"
        )
