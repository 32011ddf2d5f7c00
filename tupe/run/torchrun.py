"""torchrun in this process, with the exit statuses of training. Needs only torch."""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .record import STOPPED


def gpus_to_use(gpus: int | None, nodes: int, node_rank: int, dry_run: bool) -> int:
    """GPUs of this node: those asked for, or for None all that are visible. Raises ValueError for more than there are,
    unless nothing is to run, and for a node that there is not."""
    if node_rank >= nodes:
        raise ValueError(f"--node-rank {node_rank}: valid with --nodes {nodes}: 0 to {nodes - 1}")
    visible = torch.cuda.device_count()
    gpus = visible if gpus is None else gpus
    if gpus > visible and not dry_run:
        raise ValueError(f"--gpus {gpus}: this machine has {visible}")
    return gpus


def free_port() -> int:
    """A port of this machine that nothing listens on: two trainings on one machine need two."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def check_environment(processes: int) -> None:
    """Raise ValueError if the environment promises other processes than a training has: it would wait for them, or
    train on as many times its batch."""
    if (others := os.environ.get("WORLD_SIZE", str(processes))) != str(processes):
        here = f"the environment says WORLD_SIZE={others}, --gpus and --nodes make {processes}"
        raise ValueError(f"{here}: unset it; `tupe` starts all processes of a node itself, without torchrun")


def run_torchrun(arguments: list) -> None:
    """Run torchrun in this process. Raises SystemExit with the status of the first process that failed.

    torchrun passes SIGTERM, SIGINT and SIGHUP on to its processes, and kills those that have not ended 30 s later.
    SIGUSR1, with which Slurm announces the end of the time, is passed on here, and training takes the time it needs.
    """
    announced = False

    def pass_on(number, frame):
        nonlocal announced
        announced = True
        processes = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        if not processes:  # torchrun still waits for the other nodes
            sys.exit(STOPPED)
        for process in processes:
            os.kill(int(process), number)

    signal.signal(signal.SIGUSR1, pass_on)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except SignalException:
        sys.exit(STOPPED)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        if announced and status == -signal.SIGUSR1:  # it had not begun to train
            sys.exit(STOPPED)
        sys.exit(max(status, 1))  # a signal's number is negative
