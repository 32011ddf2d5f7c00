"""One process of a training run: fairseq-train's own training.

    python -m tupe.plugin.worker --command "tupe pretrain ..." [arguments of fairseq-train]

is what torchrun starts on every GPU; a run of one process calls `train` where it is.
"""

import os
import shlex
import sys
import traceback

import click
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train as fairseq_train  # sets up logging, as fairseq-train does
from omegaconf import open_dict

from ..options import Command, Refusal
from .run import recorded


def train(arguments: list):
    """Do in this process what `fairseq-train` does with these arguments.

    Raises what the user can cause as this package's own code raises it: ValueError, or BlockingIOError if another
    process trains in that folder. Of any other error the traceback is printed, and `Refusal` says it in one line.
    """
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    if torch.distributed.is_torchelastic_launched():
        # fairseq knows torchrun by its environment too, but divides by the number of GPUs, also where there are none.
        with open_dict(cfg):
            place = cfg.distributed_training
            place.distributed_init_method, place.distributed_no_spawn = "env://", True
            place.distributed_world_size = int(os.environ["WORLD_SIZE"])
            place.distributed_rank, place.device_id = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        with recorded():
            distributed_utils.call_main(cfg, fairseq_train.main)
    except Exception as error:
        if isinstance(error, BlockingIOError) or isinstance(error, ValueError) and _is_ours(error):
            raise
        traceback.print_exc()
        raise Refusal(f"training failed: {type(error).__name__}: {error}", 1) from error


def _is_ours(error):
    """Whether this package raised it (and not a library that it called)."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals["__name__"].startswith("tupe.")


@click.command(cls=Command, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--command", required=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(command, arguments):
    sys.argv = shlex.split(command)  # the record of the run says what was typed, not what torchrun started
    train(arguments)


if __name__ == "__main__":
    main()
