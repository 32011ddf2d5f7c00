"""Processes on this machine: workers that end with the process which started them, and commands of `tupe`. Needs only
the standard library."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .stop import SIGNALS

PROGRAM = (sys.executable, "-m", "tupe")
LONGEST_FOLDER = 107 - len("/listener-12345678")  # of a Unix socket's path, and the name of Python's in a folder


def prepare_for_data_workers(fewest: int = 256) -> None:
    """Let this process have as many open files as it may, and one temporary folder for all its data workers, which
    leave with it. (Each would have its own, and not remove it.) Raises ValueError for a machine that allows too few,
    and for a TMPDIR whose path is too long for their sockets: data workers would wait for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else max(soft, 2**16)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < fewest:
        raise ValueError(f"this shell allows {most} open files, and training needs {fewest}: ulimit -n 1024")
    folder = multiprocessing.util.get_temp_dir()
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise ValueError(f"{folder}: a path of at most {LONGEST_FOLDER} bytes holds sockets: export TMPDIR=/tmp")


@contextmanager
def workers(count: int) -> Iterator[concurrent.futures.Executor]:
    """`count` copies of this process; all have ended afterwards, whatever they were doing. Raises
    `concurrent.futures.BrokenExecutor` if one of them dies.

    Not a `multiprocessing.Pool`, which waits for ever for a task whose worker was killed. Signals wait while workers
    are forked, because an exception that a handler raises meanwhile is lost; and while they end, because a signal that
    interrupts the join of a thread makes Python before 3.13 take the thread for ended.
    """
    fork = multiprocessing.get_context("fork")  # workers inherit all imports
    pool = concurrent.futures.ProcessPoolExecutor(count, fork, initializer=_begin)
    try:
        with waiting_signals():
            pool.submit(int)  # the first task starts all workers
        yield pool
    finally:
        with waiting_signals():
            # Not asked, but ended: a worker that a signal to the whole group has just killed may hold the lock through
            # which the others would hear that there is no more work.
            _end_workers()
            pool.shutdown(cancel_futures=True)


@contextmanager
def waiting_signals() -> Iterator[None]:
    """Inside, signals wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin():
    """Begin a worker. It ends when its parent is killed, or would wait for work for ever; and at SIGTERM at once: an
    exception would be sent to the parent as a result, through a lock which a worker that was killed may hold. Ctrl-C
    is the parent's, which ends its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (multiprocessing.connection.wait([parent]), os._exit(1)), daemon=True).start()


def _end_workers(seconds=5):
    """End all processes that this one has started, by force those that are left after some seconds."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0, deadline - time.monotonic()))
        child.kill()
