"""Handlers of signals, and those that ask training to stop after its update, with the exit status `record.STOPPED`."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .record import STOPPED

logger = logging.getLogger(__name__)

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@contextmanager
def handled(numbers: Iterable[int], handler: Callable | signal.Handlers) -> Iterator[None]:
    """Inside, signals have this handler; those that are ignored (nohup) stay ignored. Beside the main thread, where
    Python handles no signals, all stay as they are."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Stop:
    """Whether this process was asked to stop. training: from the first update on; before, a signal ends it at once."""

    def __init__(self):
        self.signal, self.training, self.stopped = None, False, False

    def receive(self, number: int, frame: Any) -> None:
        if not self.training:
            raise SystemExit(STOPPED)
        if self.signal is None:
            logger.warning(f"received {signal.Signals(number).name}: stopping after this update")
        self.signal = number


_stop = None


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, signals stop training after its update, with SystemExit at the end; see `handled`."""
    global _stop
    _stop = Stop()
    try:
        with handled(SIGNALS, _stop.receive):
            yield
            if _stop.stopped:
                raise SystemExit(STOPPED)
    finally:
        _stop = None


# A signal for a whole process group (of a terminal, of Slurm) reaches the data workers too, and PyTorch would end
# training at the death of one of them. So they obey only their parent.
def _shield_child():
    if _stop is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_at_parents_request, args=[os.getppid()], daemon=True).start()


def _end_at_parents_request(parent):
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_shield_child)


def begin() -> None:
    """From here on a signal is noted, and training ends after its update; before, it ends at once."""
    if _stop is not None:
        _stop.training = True


def asked() -> bool:
    """Whether this process was asked to stop."""
    return _stop is not None and _stop.signal is not None


def is_at(updates: int, interval: int) -> bool:
    """Whether something is done after this update that is done every `interval` updates (0: never)."""
    return interval > 0 and updates % interval == 0


def end() -> None:
    """Training has stopped as asked: `stoppable` ends with `record.STOPPED`."""
    if _stop is not None:
        _stop.stopped = True
