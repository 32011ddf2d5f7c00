"""torchrun in this process, with the exit statuses of training. Needs only torch."""

import os
import signal
import sys
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .record import STOPPED


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
