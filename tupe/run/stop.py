"""Handlers of signals, and those that ask training to stop, with the exit status `record.STOPPED`.

A run stops before its next pass, forward and backward, of a batch: an update may take many. The update that it is in
the middle of is dropped, and computed anew when the run goes on from the last whole one.
"""

import gc
import logging
import os
import signal
import threading
import time
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


ONE_REQUEST = 2  # seconds in which a signal that comes again is the same request: a terminal, and torchrun, pass it on
KEY = "tupe: the unit that is computed"


class Agreement:
    """Several processes, all of which stop before the same pass, or none: who stopped alone would leave the others
    waiting for its gradients.

    They share one text: the number of the unit of work that all compute, or "stop" before the number of one that none
    does. The first that needs to know decides, and nobody waits for another: whoever is asked to stop, and whoever is
    about to compute what needs all, the last pass of an update. store: that of their process group.
    """

    def __init__(self, store: Any):
        self.store, self.unit = store, 1
        store.compare_set(KEY, "", "0")

    def goes_on(self, asked: bool, together: bool) -> bool:
        """Whether the next pass is computed. together: it needs all processes, and with it the unit is complete."""
        if asked or together:
            wanted = f"{'stop ' * asked}{self.unit}"
            decided = self.store.compare_set(KEY, f"{self.unit - 1}", wanted).decode()
        else:
            decided = self.store.get(KEY).decode()
        stops = decided == f"stop {self.unit}"
        self.unit += together and not stops
        return not stops


class Stop:
    """Whether this process was asked to stop. start: the number of updates at the first pass here; before, None, a
    signal ends the process at once, as does a second one later."""

    def __init__(self):
        self.signal = self.start = self.agreement = self.pipe = None

    def receive(self, number: int, frame: Any) -> None:
        if self.start is None:
            raise SystemExit(STOPPED)
        if self.signal is None:
            name = signal.Signals(number).name
            logger.warning(f"received {name}: stopping at the last whole update; another signal ends this at once")
            self.pipe = os.pipe()
            os.set_blocking(self.pipe[1], False)
            signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._end_at_another, args=[self.pipe[0], time.monotonic()], daemon=True).start()
        self.signal = number

    def _end_at_another(self, reader, since):
        """In a thread: the main one handles no signals while it is in the middle of a backward pass."""
        while number := os.read(reader, 1):
            if number[0] in SIGNALS and time.monotonic() - since > ONE_REQUEST:
                os._exit(STOPPED)
        os.close(reader)

    def close(self) -> None:
        if self.pipe:
            signal.set_wakeup_fd(-1)
            os.close(self.pipe[1])


_stop = None


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, signals end training with `record.STOPPED`; see `handled`."""
    global _stop
    _stop = Stop()
    try:
        with handled(SIGNALS, _stop.receive):
            yield
    finally:
        _stop.close()
        _stop = None


# A signal for a whole process group (of a terminal, of Slurm) reaches the data workers too, and PyTorch would end
# training at the death of one of them. So they obey only their parent.
def _shield_child():
    if _stop is not None:
        gc.freeze()  # else a worker collects the loader of its parent's last epoch, which complains on the console
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_at_parents_request, args=[os.getppid()], daemon=True).start()


def _end_at_parents_request(parent):
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_shield_child)


def begin(updates: int) -> None:
    """Called before the first pass of every update, of which `updates` are done. From here on a signal is noted, and
    `goes_on` tells of it; before, it ends training at once."""
    if _stop is None or _stop.start is not None:
        return
    _stop.start = updates
    import torch  # only here: commands that do not train start without it

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        _stop.agreement = Agreement(torch.distributed.distributed_c10d._get_default_store())


def goes_on(together: bool) -> bool:
    """Whether the next pass is to be computed; of several processes, all that compute the same get the same answer.
    together: it needs all processes, as the last of an update does, in which they exchange gradients."""
    if _stop is None:
        return True
    asked = _stop.signal is not None
    return _stop.agreement.goes_on(asked, together) if _stop.agreement else not asked


def is_at_start(updates: int) -> bool:
    """Whether so many updates were done before this process did any: then there is nothing to save."""
    return _stop is not None and updates == _stop.start


def is_at(updates: int, interval: int) -> bool:
    """Whether something is done after this update that is done every `interval` updates (0: never)."""
    return interval > 0 and updates % interval == 0
