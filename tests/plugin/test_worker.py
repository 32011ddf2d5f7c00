"""Several processes: `tupe pretrain --gpus 2`, whose two processes are on the CPU here."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import PLUGIN, load, pretrain_arguments, train, write_data

from tupe.record import BUSY, STOPPED, locked, read, state_of

TWO_GPUS = "import torch; torch.cuda.device_count = lambda: 2\nfrom tupe.cli import main\nmain()"  # or so it believes
QUIET = ["--dropout=0", "--attention-dropout=0", "--max-update=6", "--total-num-update=14"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("worker") / "data")


def start(data, folder, *more):
    """`tupe pretrain` with two processes, as `pretrain_arguments` trains with one."""
    return subprocess.run(**command(data, folder, *more), capture_output=True)


def command(data, folder, *more):
    """Arguments of `subprocess` for it."""
    words = [f"--data={data}", f"--output={folder}", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01"]
    words += ["--warmup-updates=2", *QUIET, "--batch-size=4", "--update-freq=1"]
    words += ["--gpus=2", "--cpu", "--distributed-backend=gloo", "--ddp-backend=legacy_ddp"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        words.append(f"--master-port={free.getsockname()[1]}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLUGIN.parent)}
    words = [sys.executable, "-c", TWO_GPUS, "pretrain", *words, *more]
    return {"args": words, "env": environment, "cwd": PLUGIN.parent, "text": True}


def test_two_processes_equal_one_with_twice_the_steps(data, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert len(train(pretrain_arguments(data, one, *QUIET, "--update-freq=2"))) == 6
    done = start(data, two)
    assert done.returncode == 0, done.stderr[-3000:]
    single, double = (load(folder / "checkpoint_last.pt") for folder in (one, two))
    for key, value in single["model"].items():
        torch.testing.assert_close(double["model"][key], value, rtol=2e-5, atol=1e-5)
    losses = [[entry["loss"] for entry in read(folder).scores] for folder in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5) and len(losses[0]) > 0
    assert state_of(two) == "finished" and "pretrain" in read(two).command and "--gpus=2" in read(two).command

    # Resuming in the middle of the epoch on one process: after the same batches, and said so.
    state = double["extra_state"]["train_iterator"]
    assert (state["num_shards"], state["iterations_in_epoch"], state["epoch"]) == (2, 1, 2)


@pytest.mark.slow
def test_a_finished_run_is_left_alone_and_a_busy_folder_has_its_status(data, tmp_path):
    assert start(data, tmp_path).returncode == 0
    finished = (tmp_path / "checkpoint_last.pt").read_bytes(), (tmp_path / "record.json").read_text()
    assert start(data, tmp_path).returncode == 0
    with locked(tmp_path / "lock"):
        assert start(data, tmp_path).returncode == BUSY
    assert finished == ((tmp_path / "checkpoint_last.pt").read_bytes(), (tmp_path / "record.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("target, number", [("one process", signal.SIGTERM), ("torchrun", signal.SIGUSR1)])
def test_a_signal_to_any_process_stops_all_after_the_same_update(data, tmp_path, target, number):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    more = ["--max-update=60", "--total-num-update=60", "--log-interval=1"]
    assert start(data, whole, *more).returncode == 0
    process = subprocess.Popen(**command(data, stopped, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for line in process.stderr:
        if "num_updates': '5'" in line or '"num_updates": "5"' in line or "num_updates=5," in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]) if target == "one process" else process.pid, number)
    process.communicate()
    assert process.returncode == STOPPED
    updates = load(stopped / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 5 <= updates < 60 and state_of(stopped) == "open"
    assert start(data, stopped, *more).returncode == 0
    for key, value in load(whole / "checkpoint_last.pt")["model"].items():
        assert torch.equal(load(stopped / "checkpoint_last.pt")["model"][key], value)
