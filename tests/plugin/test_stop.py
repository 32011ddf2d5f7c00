"""Training that a signal stops: one process here, two in a test of `tupe pretrain --gpus 2`."""

import multiprocessing
import os
import signal

import pytest
import torch
from helpers import load, pretrain_arguments, train

from tupe.common.record import STOPPED, read, state_of
from tupe.common.stop import SIGNALS, is_at


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """(folder, losses) of an undisturbed run of two epochs of 6 updates and a bit."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(arguments(data, folder))


def arguments(data, folder, *more):
    return pretrain_arguments(data, folder, "--num-workers=1", "--save-interval-updates=5", *more)


def stop(arguments, update, number):
    """Train, and send this process and its data workers a signal within an update. Returns the exit status."""
    steps = iter(range(1, 100))

    def on_step(samples):
        if next(steps) == update:
            for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
                os.kill(pid, number)

    try:
        train(arguments, on_step)
    except SystemExit as error:
        status = error.code
    for child in multiprocessing.active_children():  # as at the end of a process
        child.terminate()
        child.join()
    return status


@pytest.mark.parametrize(
    "update, number",
    [
        pytest.param(3, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("epoch", signal.SIGHUP, marks=pytest.mark.thorough),
        pytest.param(5, signal.SIGUSR1, marks=pytest.mark.thorough),
        pytest.param(13, signal.SIGINT, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_stopped_run_loses_nothing_and_resumes_exactly(data, whole, tmp_path, update, number):
    """In the middle of an epoch; where a checkpoint is due; at the end of an epoch; in the second epoch."""
    folder, losses = whole
    scored = [(entry["epoch"], entry["num_updates"]) for entry in read(folder).scores]
    update = max(updates for epoch, updates in scored if epoch == 1) if update == "epoch" else update
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # ignored where the tests run in the background
    handlers = [signal.getsignal(n) for n in SIGNALS]
    assert stop(arguments(data, tmp_path), update, number) == STOPPED
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    signal.signal(number, before)
    state = load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == update
    assert state["cfg"]["optimization"]["stop_time_hours"] == 0 and not state["cfg"]["dataset"]["disable_validation"]
    run = read(tmp_path)
    assert state_of(tmp_path) == "open" and run.failure == {"reason": "stopped by a signal", "status": STOPPED}
    assert [entry["num_updates"] for entry in run.scores] == [n for _, n in scored if n <= update]
    assert train(arguments(data, tmp_path)) == losses[update:]
    assert read(tmp_path).scores == read(folder).scores and state_of(tmp_path) == "finished"
    for key, value in load(folder / "checkpoint_last.pt")["model"].items():
        assert torch.equal(load(tmp_path / "checkpoint_last.pt")["model"][key], value)


def test_a_signal_before_the_first_update_ends_at_once(data, tmp_path):
    assert stop(arguments(data, tmp_path), 1, signal.SIGTERM) == STOPPED
    assert not list(tmp_path.glob("*.pt")) and state_of(tmp_path) == "open"


def test_an_interval_of_0_is_never():
    assert [n for n in range(1, 7) if is_at(n, 3)] == [3, 6] and not is_at(3, 0)
