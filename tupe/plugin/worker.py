"""One process of a training run: fairseq-train's own training.

    python -m tupe.plugin.worker --command "tupe pretrain ..." --config CONFIGURATION

is what torchrun starts for every GPU, or with arguments of fairseq-train in place of --config; a run of one process
calls `train` directly.
"""

import json
import os
import shlex
import sys

import click
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train as fairseq_train  # sets up logging, as fairseq-train does
from omegaconf import DictConfig, OmegaConf, open_dict

from ..common import console
from ..common.active import refuse
from ..common.options import Command
from ..run.stop import stoppable
from ..run.torchrun import check_environment
from . import patches
from .recorded import recorded, true_reason

patches.apply(patches.BY_TUPE)


def parsed(arguments: list) -> DictConfig:
    """The configuration that `fairseq-train` makes of its arguments."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))


def to_text(cfg: DictConfig) -> str:
    """A configuration as an argument; numbers keep every digit."""
    return json.dumps(OmegaConf.to_container(cfg), allow_nan=False)


def from_text(text: str) -> DictConfig:
    cfg = OmegaConf.create(json.loads(text))
    OmegaConf.set_struct(cfg, True)
    return cfg


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


@click.command(cls=Command, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--command", required=True)
@click.option("--config")
@click.option("--yes", is_flag=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(command, config, yes, arguments):
    sys.argv = shlex.split(command)  # the record of the run has the command that was typed, not torchrun's
    with console.logged():
        train(from_text(config) if config else parsed(arguments), yes)


if __name__ == "__main__":
    main()
