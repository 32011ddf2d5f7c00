"""One process of a training: what fairseq-train does. `tupe` calls it, in as many processes as torchrun starts."""

import os

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train as fairseq_train  # sets up logging, as fairseq-train does
from omegaconf import DictConfig, open_dict

from ..common.active import refuse
from ..run.stop import stoppable
from ..run.torchrun import check_environment
from . import patches
from .recorded import recorded, true_reason

patches.apply(patches.BY_TUPE)


def train(cfg: DictConfig, yes: bool = False) -> None:
    """Do in this process what `fairseq-train` does with this configuration. yes: however long it takes on a CPU.

    Raises ValueError for a mistake of the user that this package detects, BlockingIOError if another process trains in
    that folder, OSError if the disk is full or read-only, and SystemExit with `record.STOPPED` if a signal stopped it.
    Any other error is a `Refusal`, see `active.refuse`.
    """
    check_environment(cfg.distributed_training.distributed_world_size)
    if torch.distributed.is_torchelastic_launched():
        # fairseq recognises torchrun by its environment too, but divides by the number of GPUs, which may be 0.
        with open_dict(cfg):
            section = cfg.distributed_training
            section.distributed_init_method, section.distributed_no_spawn = "env://", True
            section.distributed_rank, section.device_id = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        with recorded(yes), stoppable():
            distributed_utils.call_main(cfg, fairseq_train.main)
    except Exception as error:
        error = true_reason(error)
        refuse(error)
        raise error
