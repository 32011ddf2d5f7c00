"""Training that a signal stops (one process here, two in test_worker), and what else follows its updates."""

import logging
import multiprocessing
import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import fork, load, parsed, pretrain_arguments, train

from tupe.common.options import Refusal
from tupe.plugin import launch
from tupe.plugin.masked_lm import TupeMaskedLMTask
from tupe.run.record import DIVERGED, STALLED, STOPPED, read, state_of
from tupe.run.stop import SIGNALS, is_at


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """(folder, losses) of an undisturbed run of three epochs of 4 updates and a bit; an update takes three passes."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(in_passes(data, folder))


def in_passes(data, folder, *more):
    passes = ["--batch-size=2", "--update-freq=3"]
    return pretrain_arguments(data, folder, "--num-workers=1", "--save-interval-updates=5", *passes, *more)


def stop(arguments, update, number, passes=1):
    """Train, and send this process and its data workers a signal within a pass of an update. Returns the exit status,
    and how many passes have begun after it."""
    step, begun = TupeMaskedLMTask.train_step, []

    def train_step(self, *args, **kwargs):
        begun.append(kwargs["update_num"] + 1)
        if begun.count(update) == passes and begun[-1] == update:
            for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
                os.kill(pid, number)
        return step(self, *args, **kwargs)

    with mock.patch.object(TupeMaskedLMTask, "train_step", train_step):
        try:
            train(arguments)
        except SystemExit as error:
            status = error.code
    for child in multiprocessing.active_children():  # as at the end of a process
        child.terminate()
        child.join()
    return status, len(begun) - begun.index(update) - passes


@pytest.mark.parametrize(
    "update, passes, number",
    [
        (3, 2, signal.SIGTERM),
        pytest.param(3, 3, signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param("next epoch", 1, signal.SIGHUP, marks=pytest.mark.thorough),
        pytest.param(5, 3, signal.SIGUSR1, marks=pytest.mark.thorough),
        pytest.param(6, 1, signal.SIGUSR1, marks=pytest.mark.thorough),
        pytest.param(13, 2, signal.SIGINT, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_a_stopped_run_loses_nothing_and_resumes_exactly(data, whole, tmp_path, update, passes, number):
    """In the middle of an update, and in its last pass, after which it is whole; in the first update of an epoch; where
    a checkpoint is due, and in the update after it. No pass begins after the signal."""
    folder, losses = whole
    scored = [(entry["epoch"], entry["num_updates"]) for entry in read(folder).scores]
    update = max(updates for epoch, updates in scored if epoch == 1) + 1 if update == "next epoch" else update
    done = update if passes == 3 else update - 1
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # ignored where the tests run in the background
    handlers = [signal.getsignal(n) for n in SIGNALS]
    assert stop(in_passes(data, tmp_path), update, number, passes) == (STOPPED, 0)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    signal.signal(number, before)
    state = load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == done
    run = read(tmp_path)
    assert state_of(tmp_path) == "open" and run.failure == {"reason": "stopped by a signal", "status": STOPPED}
    assert [entry["num_updates"] for entry in run.scores] == [n for _, n in scored if n <= done]
    assert train(in_passes(data, tmp_path)) == losses[done:]
    assert read(tmp_path).scores == read(folder).scores and state_of(tmp_path) == "finished"
    for key, value in load(folder / "checkpoint_last.pt")["model"].items():
        assert torch.equal(load(tmp_path / "checkpoint_last.pt")["model"][key], value)


def test_a_signal_in_the_first_update_leaves_nothing_behind(data, tmp_path):
    assert stop(in_passes(data, tmp_path), 1, signal.SIGTERM) == (STOPPED, 0)
    assert not list(tmp_path.glob("*.pt")) and state_of(tmp_path) == "open"


def test_an_interval_of_0_is_never():
    assert [n for n in range(1, 7) if is_at(n, 3)] == [3, 6] and not is_at(3, 0)


# ------------------------------------------------------------------------------------------------- losses and progress


def arguments(data, folder, *more):
    return pretrain_arguments(data, folder, "--num-workers=0", "--max-update=8", *more)


def test_a_run_that_diverges_has_its_own_status(data, tmp_path):
    with pytest.raises(Refusal, match="training failed: FloatingPointError: ") as refusal:
        launch.train(parsed([*arguments(data, tmp_path), "--lr=[1e38]"]))  # which `tupe` refuses
    assert refusal.value.exit_code == DIVERGED and state_of(tmp_path) == "failed"
    failure = read(tmp_path).failure
    assert failure["status"] == DIVERGED and failure["reason"].startswith("diverged: ")


def test_a_process_that_hangs_ends_itself(data, tmp_path):
    def run():
        with mock.patch.object(Trainer, "_reduce_and_log_stats", lambda *args: time.sleep(600)):
            launch.train(parsed(arguments(data, tmp_path, "--heartbeat-timeout=1")))

    process = fork(run, "tupe")
    process.join()
    assert process.exitcode == STALLED and state_of(tmp_path) == "failed"
    assert re.fullmatch(r"no progress for 1 s, in <lambda> \(.*test_steps.py:\d+\)", read(tmp_path).failure["reason"])


@pytest.mark.parametrize("most, batches", [(0, 4), (1, 1), (2, 2)])
def test_a_validation_takes_as_many_batches_as_asked_for(data, tmp_path, most, batches):
    """fairseq's takes one more, and with 0 one instead of all."""
    scored, valid_step = [], Trainer.valid_step

    def counted(trainer, sample, *args, **kwargs):
        scored.append(sample["nsentences"])
        return valid_step(trainer, sample, *args, **kwargs)

    words = ["--max-update=1", "--batch-size-valid=1", f"--max-valid-steps={most}"]
    with mock.patch.object(Trainer, "valid_step", counted):
        config = parsed(arguments(data, tmp_path, *words))
        launch.train(config)
    assert len(scored) == batches and (config.dataset.max_valid_steps or 0) == most


def test_progress_lines_without_a_terminal_show_the_time_left(data, tmp_path, caplog, capfd):
    with caplog.at_level(logging.INFO):
        launch.train(parsed(arguments(data, tmp_path, "--log-format=tqdm")))
    lines = [record.getMessage() for record in caplog.records if record.name == "train_inner"]
    assert len(lines) == 8 and all(re.search(r", left=0:00:\d\d", line) for line in lines[1:])
    written = capfd.readouterr()
    assert "\r" not in written.out + written.err and "it/s" not in written.out + written.err
