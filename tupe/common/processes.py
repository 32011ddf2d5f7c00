"""Processes on this machine: workers that end with the process which started them, and commands of `tupe`. Needs only
the standard library."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

PROGRAM = (sys.executable, "-m", "tupe")


def complete(command: Iterable) -> None:
    """Run a command to its end, and show nothing of it. Raises ValueError with its last line if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", errors="backslashreplace")
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise ValueError(said.splitlines()[-1] if said else f"exit status {done.returncode}")


@contextmanager
def workers(count: int, start: Callable = lambda: None, *arguments) -> Iterator[concurrent.futures.Executor]:
    """`count` copies of this process, each of which calls start(*arguments) first; all have ended afterwards. After an
    exception, tasks that run are finished and no others are begun; a signal ends the workers too. Raises
    `concurrent.futures.BrokenExecutor` if one of them dies.

    Not a `multiprocessing.Pool`: that waits for ever for a task whose worker was killed; and it ends its workers with
    SIGTERM, which a worker that is just being forked may not notice where the signal has a handler.
    """
    fork = multiprocessing.get_context("fork")  # workers inherit all imports
    pool = concurrent.futures.ProcessPoolExecutor(count, fork, initializer=_begin, initargs=(start, *arguments))
    # Every way out waits for the workers: left to the end of the process they get no word where that is itself a child
    # of multiprocessing, which closes their queue first and then waits for them for ever.
    shut_down = _shutting_down(pool)
    try:
        try:
            yield pool
        except Exception:
            shut_down(cancel_futures=True)
            raise
        shut_down()
    except BaseException as error:
        if isinstance(error, concurrent.futures.BrokenExecutor) or not isinstance(error, Exception):  # also in shutdown
            _end_workers()
            shut_down(cancel_futures=True)
        raise


def _shutting_down(pool):
    """`pool.shutdown` once, in a thread. Called anew after a signal has interrupted it, it waits for the rest.

    Before Python 3.13 a signal that interrupts `Thread.join` makes the thread count as ended: the process would end
    beside the pool's own thread, and with status 1 where that closes a pipe in the same moment.
    """
    ended = threading.Event()
    begun = []

    def shut_down(**options):
        if not begun:
            begun.append(threading.Thread(target=lambda: (pool.shutdown(**options), ended.set())))
            begun[0].start()
        ended.wait()

    return shut_down


def _begin(start, *arguments):
    """Begin a worker. It ends when its parent is killed, or would wait for work for ever; and at SIGTERM at once: an
    exception would be sent to the parent as a result, through a lock which a worker that was killed may hold. Ctrl-C
    is the parent's, which ends its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (multiprocessing.connection.wait([parent]), os._exit(1)), daemon=True).start()
    start(*arguments)


def _end_workers(seconds=5):
    """End all processes that this one has started, by force those that are left after some seconds."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0, deadline - time.monotonic()))
        child.kill()
