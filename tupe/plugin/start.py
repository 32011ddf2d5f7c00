"""What a run is told before it begins, whichever command started it: its precision, and what an update trains on."""

import logging

import torch
from fairseq.dataclass.configs import FairseqConfig
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .. import config as schema

logger = logging.getLogger("tupe.launch")


class Refused(ValueError, SystemExit):
    """A mistake of the user. As a SystemExit it is one line of fairseq's own programs, too."""

    code = property(str)


def choose_precision(config: DictConfig | FairseqConfig) -> None:
    """Under Hydra, train in float32 without a GPU: its recipes, the same on all machines, say fp16. Raises
    Refused where the user says so, ValueError for a model that fp16 cannot train. config: the whole configuration."""
    common = config.common
    on_gpu = torch.cuda.is_available() and not common.cpu
    if common.fp16 and on_gpu and getattr(config.model, "normaliser", "") == "exp":
        raise ValueError("normaliser exp overflows under --fp16; valid: --autocast bf16, or float32")
    if not common.fp16 or on_gpu:
        return
    if not HydraConfig.initialized():
        raise Refused(schema.NO_GPU)
    logger.warning("no GPU: common.fp16=false common.cpu=true")
    common.fp16, common.cpu = False, True


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
    if processes > 1 and HydraConfig.initialized():
        logger.warning(
            f"the batch of a recipe is for one process, and an update takes {processes} of them: `tupe pretrain` "
            "divides it, here dataset.batch_size=N and optimization.update_freq=[M] do"
        )
    if 0 < length.max_update <= warmup:
        last = length.lr[0] * length.max_update / warmup
        logger.warning(
            f"a warm-up of {warmup} updates in a run of {length.max_update}: the learning rate only rises, to "
            f"{last:.3g}; --warmup-updates chooses another"
        )
