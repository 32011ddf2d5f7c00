"""Several processes: `tupe pretrain --gpus 2`, whose two processes are on the CPU here."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from helpers import PLUGIN, load, pretrain_arguments, train, write_data

from tupe.record import BUSY, locked, read, state_of

TWO_GPUS = "import torch; torch.cuda.device_count = lambda: 2\nfrom tupe.cli import main\nmain()"  # or so it believes
QUIET = ["--dropout=0", "--attention-dropout=0", "--max-update=6", "--total-num-update=14"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("worker") / "data")


def start(data, folder):
    """`tupe pretrain` with two processes, as `pretrain_arguments` trains with one."""
    words = [f"--data={data}", f"--output={folder}", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01"]
    words += ["--warmup-updates=2", *QUIET, "--batch-size=4", "--update-freq=1"]
    words += ["--gpus=2", "--cpu", "--distributed-backend=gloo", "--ddp-backend=legacy_ddp"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        words.append(f"--master-port={free.getsockname()[1]}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLUGIN.parent)}
    command = [sys.executable, "-c", TWO_GPUS, "pretrain", *words]
    return subprocess.run(command, env=environment, cwd=PLUGIN.parent, capture_output=True, text=True)


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
