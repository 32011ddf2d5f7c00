"""Signals to a process that trains, and how several agree on a stop."""

import ctypes
import gc
import os
import signal
import time

import pytest
import torch
from helpers import ended, fork, wait_until

from tupe.run import stop
from tupe.run.record import STOPPED


@pytest.mark.parametrize("store", ["hash", "tcp"])
def test_all_processes_stop_before_the_same_pass_or_none(store):
    """Updates of three passes, of which the last needs both processes."""
    shared = torch.distributed.HashStore() if store == "hash" else torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    one, two = stop.Agreement(shared), stop.Agreement(shared)
    for _ in range(2):
        assert [each.goes_on(False, last) for last in (False, False, True) for each in (one, two)] == [True] * 6
    # One has begun the last pass of the third update: the other, which is asked to stop, computes all of it, too.
    assert [one.goes_on(False, last) for last in (False, False, True)] == [True] * 3
    assert [two.goes_on(True, last) for last in (False, False, True)] == [True] * 3
    # Both are in the middle of the fourth: neither computes what is left of it, asked or not, and whatever comes first.
    assert one.goes_on(False, False) and two.goes_on(False, False)
    assert not two.goes_on(True, False) and not one.goes_on(False, True) and not one.goes_on(True, False)


def wait_for_ever():
    """In C, where Python handles no signal."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_training_at_once(number, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "ONE_REQUEST", 0)

    def train():
        with stop.stoppable():
            stop.begin(3)
            assert stop.goes_on(True)
            os.kill(os.getpid(), number)
            assert not stop.goes_on(True) and stop.is_at_start(3)
            (tmp_path / "waits").touch()
            wait_for_ever()

    process = fork(train)
    wait_until((tmp_path / "waits").exists)
    os.kill(process.pid, number)
    assert ended(process) == STOPPED


def test_the_same_signal_from_several_is_one_request():
    """A terminal sends it to all processes of a command, and torchrun passes it on."""

    def train():
        with stop.stoppable():
            stop.begin(0)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        os._exit(7)

    assert ended(fork(train)) == 7


def test_handlers_are_as_before():
    handlers = [signal.getsignal(number) for number in stop.SIGNALS]
    with stop.stoppable():
        stop.begin(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not stop.goes_on(True)
    assert [signal.getsignal(number) for number in stop.SIGNALS] == handlers and stop.goes_on(True)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_data_worker_does_not_end_what_its_parent_has_left(tmp_path):
    """PyTorch's loader of the last epoch, for example, which would complain on the console."""

    class Left:
        def __init__(self):
            self.own = self  # only the garbage collector ends it

        def __del__(self):
            if os.getpid() != parent:
                (tmp_path / "ended").touch()

    parent = os.getpid()
    gc.disable()
    try:
        Left()
        with stop.stoppable():
            assert ended(fork(gc.collect)) == 0
    finally:
        gc.enable()
    assert not (tmp_path / "ended").exists()
