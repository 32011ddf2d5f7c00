"""The life of a run inside fairseq, shown on pre-training: its folder, its record, its end. See test_finetune too."""

import fcntl
import functools
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import PLUGIN, fork, load, parsed, pretrain_arguments, train

from tupe.checkpoints.trained import read_model
from tupe.plugin import launch
from tupe.plugin import recorded as life
from tupe.run import progress
from tupe.run.record import begun, read, state_of

ROOT = PLUGIN.parent


def arguments(data, save_dir, *more):
    return pretrain_arguments(data, save_dir, "--num-workers=0", "--max-update=4", *more)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """(folder, losses) of a run of 4 updates, validated after 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(arguments(data, folder, "--validate-interval-updates=2"))


def test_a_run_from_scratch_is_recorded(finished):
    folder, losses = finished
    run = read(folder)
    assert len(losses) == 4 and run.state == state_of(folder) == "finished"
    assert (run.task, run.architecture, run.variant, run.seed, run.lr) == ("masked_lm", "tupe_r_tiny", "", 1, 0.01)
    assert (run.budget, run.splits, run.pretrained, run.metrics) == ({"max_update": 4}, ["valid"], None, [])
    assert run.started_at <= run.finished_at and run.failure is None
    assert [(entry["num_updates"], entry["split"]) for entry in run.scores] == [(2, "valid"), (4, "valid")]
    assert run.best() == ("loss", min(entry["loss"] for entry in run.scores))
    saved = load(folder / "checkpoint_last.pt")["extra_state"]["val_loss"]  # what fairseq prints and stores is rounded
    assert round(run.scores[-1]["loss"], 3) == saved != run.scores[-1]["loss"]


def test_a_finished_run_is_left_alone_and_says_so(data, finished, caplog):
    folder, _ = finished
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"}
    assert train(arguments(data, folder, "--validate-interval-updates=2")) == []
    assert f"{folder} holds the finished run already: nothing to train" in caplog.messages
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"}


def test_a_run_from_scratch_may_be_made_longer(data, finished, tmp_path):
    """As after a kill between the last checkpoint and the end: the checkpoint says what is left to do. The model in the
    run's folder is always that of its end."""
    folder, losses = finished
    for name in ("record.json", "checkpoint_last.pt", "config.json", "model.safetensors", "training.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert len(train(arguments(data, tmp_path, "--max-update=6"))) == 2
    run = read(tmp_path)
    assert run.budget == {"max_update": 6} and run.started_at == read(folder).started_at
    assert [entry["num_updates"] for entry in run.scores] == [2, 4, 6]
    run.state = "running"
    run.save(tmp_path)
    last = read_model(tmp_path / "checkpoint_last.pt")
    for _ in range(2):
        model = read_model(tmp_path)
        assert model.updates == 6 and all(torch.equal(x, model.weights[key]) for key, x in last.weights.items())
        (tmp_path / "config.json").unlink()  # as of a kill before the model was there
        assert train(arguments(data, tmp_path, "--max-update=6")) == [] and read(tmp_path).state == "finished"


def test_an_unfinished_run_is_no_shorter_one(data, finished, tmp_path):
    """It is not over because less is asked for; what is asked for at its last checkpoint is there."""
    folder, _ = finished
    (tmp_path / "checkpoint_last.pt").write_bytes((folder / "checkpoint_last.pt").read_bytes())
    run = read(folder)
    run.budget, run.state = {"max_update": 100}, "stopped"
    run.save(tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    with pytest.raises(ValueError, match="has 4 updates; --max-update: valid: at least 4, or another folder"):
        train(arguments(data, tmp_path, "--max-update=3"))
    assert (tmp_path / "record.json").read_bytes() == before and not (tmp_path / "config.json").exists()
    assert train(arguments(data, tmp_path, "--max-update=4")) == []
    assert (read(tmp_path).state, read(tmp_path).budget) == ("finished", {"max_update": 4})
    assert read_model(tmp_path).updates == 4


def test_a_run_that_a_limit_stops_stays_open(data, tmp_path):
    assert len(train(arguments(data, tmp_path, "--stop-time-hours=1e-9"))) == 1
    assert state_of(tmp_path) == "open" and read(tmp_path).failure is None


def test_a_cpu_asks_before_it_begins_what_takes_long(data, tmp_path, monkeypatch, caplog):
    """It has one pass behind it then, and no run has begun. A resumed run has been asked."""
    monkeypatch.setattr(progress, "LONG", 0)
    caplog.set_level("INFO")
    passes = ["--batch-size=2", "--update-freq=2", "--max-update=6"]
    with pytest.raises(ValueError, match="^6 updates would take about .* on this CPU: .*, or add --yes$"):
        launch.train(parsed(arguments(data, tmp_path, *passes)))
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("after the first pass of 2: ") for line in said) and not begun(tmp_path)
    assert not [record for record in caplog.records if record.name == "train_inner"]
    caplog.clear()
    launch.train(parsed(arguments(data, tmp_path, *passes, "--lr=[0.001]")), yes=True)
    assert any(record.getMessage().startswith("after 5 updates: ") for record in caplog.records)
    launch.train(parsed(arguments(data, tmp_path, *passes, "--lr=[0.001]", "--max-update=7")))
    assert read(tmp_path).budget == {"max_update": 7} and state_of(tmp_path) == "finished"


def test_a_folder_in_use_is_refused(data, tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process would
        with pytest.raises(BlockingIOError, match="another process is training in"):
            train(arguments(data, tmp_path))


def test_the_end_of_the_process_completes_the_record(data, tmp_path, monkeypatch):
    """As under fairseq-train, where nothing of ours catches the error: it is the one with which Python ends."""

    def fail(*args):
        raise FloatingPointError("gradients are Nan/Inf")

    monkeypatch.setattr(life, "recorded", nullcontext)
    monkeypatch.setattr(Trainer, "train_step", fail)
    with pytest.raises(FloatingPointError):
        train(arguments(data, tmp_path))
    assert state_of(tmp_path) == "running"
    monkeypatch.setattr(sys, "last_value", FloatingPointError("gradients are Nan/Inf"), raising=False)
    life._end_of_process()
    assert state_of(tmp_path) == "failed"
    assert read(tmp_path).failure == {"reason": "diverged: gradients are Nan/Inf", "status": 1}


# A run in a process of its own, which ends in another way than by coming to its end.
SCRIPT = """
import os, signal, sys
sys.argv = ["fairseq-train", *sys.argv[1:]]
from fairseq.trainer import Trainer
step = Trainer.train_step
def fail(self, samples, **options):
    if self.get_num_updates() == 3:
        {code}
    return step(self, samples, **options)
Trainer.train_step = fail
from fairseq_cli.train import cli_main
cli_main()
"""
CODES = {
    "diverged: gradients are Nan/Inf": "raise FloatingPointError('gradients are Nan/Inf')",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "killed" else pytest.mark.slow) for name in CODES]
)
def test_what_is_left_of_a_run_that_ended_early(name, data, finished, tmp_path):
    """fairseq-train itself, without any help: only a failure is one, what was stopped goes on as if it had not been."""
    script, words = SCRIPT.format(code=CODES[name]), arguments(data, tmp_path, "--save-interval-updates=2")
    if name == "killed":
        process = fork(functools.partial(exec, script, {}), "", *words)
        process.join()
        assert process.exitcode == -signal.SIGTERM
    else:  # the interpreter's end matters
        command = [sys.executable, "-c", script, *words]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0
    run = read(tmp_path)
    assert run.command.startswith("fairseq-train ") and f"--save-dir={tmp_path}" in run.command
    if name in ("interrupted", "killed"):
        assert state_of(tmp_path) == "open" and run.failure is None and run.finished_at is None
        assert train(words) == finished[1][2:] and state_of(tmp_path) == "finished"
    else:
        assert state_of(tmp_path) == "failed" and run.failure == {"reason": name, "status": 1} and run.finished_at
