"""What every run settles and says before it begins, whichever command started it."""

import logging

import torch
from fairseq.dataclass.configs import FairseqConfig
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..common import limits

logger = logging.getLogger("tupe.launch")


class NoGPU(ValueError, SystemExit):
    """--fp16 on a CPU. As a SystemExit it is one line of fairseq-train too."""

    code = limits.NO_GPU


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
        raise NoGPU(limits.NO_GPU)
    logger.warning("no GPU: common.fp16=false common.cpu=true")
    common.fp16, common.cpu = False, True


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
