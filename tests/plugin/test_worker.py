"""Several processes: `tupe pretrain --gpus 2`, whose two processes are on the CPU here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import PLUGIN, descendants, fork, free_port, load, parsed, pretrain_arguments, train

from tupe.cli import main
from tupe.plugin import launch
from tupe.plugin.masked_lm import TupeMaskedLMTask
from tupe.run import torchrun
from tupe.run.folder import locked
from tupe.run.record import BUSY, STOPPED, read, state_of

TWO_GPUS = "import torch; torch.cuda.device_count = lambda: 2\nfrom tupe.cli import main\nmain()"  # or so it believes
QUIET = ["--dropout=0", "--attention-dropout=0", "--max-update=6", "--total-num-update=14"]


def start(data, folder, *more):
    """`tupe pretrain` with two processes, as `pretrain_arguments` trains with one."""
    return subprocess.run(**command(data, folder, *more), capture_output=True)


def words(data, folder, *more):
    """Of `tupe pretrain`."""
    given = [f"--data={data}", f"--output={folder}", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01"]
    given += ["--warmup-updates=2", *QUIET, "--batch-size=4", "--update-freq=1"]
    given += ["--gpus=2", "--cpu", "distributed_training.distributed_backend=gloo", "--ddp-backend=legacy_ddp"]
    return [*given, f"--master-port={free_port()}", *more]


def command(data, folder, *more):
    """Arguments of `subprocess` for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLUGIN.parent)}
    arguments = [sys.executable, "-c", TWO_GPUS, "pretrain", *words(data, folder, *more)]
    return {"args": arguments, "env": environment, "cwd": PLUGIN.parent, "text": True}


def forked_workers(arguments):
    """Does what torchrun does on one machine, but for starting interpreters. arguments: torchrun's."""
    assert arguments.module and arguments.training_script == "tupe"
    environment = {
        "WORLD_SIZE": arguments.nproc_per_node, "MASTER_ADDR": arguments.master_addr,
        "MASTER_PORT": str(arguments.master_port), "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    torch.cuda.device_count = lambda: 0
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(arguments.nproc_per_node))]
    processes = [fork(main, "tupe", *arguments.training_script_args, **environment, **rank) for rank in ranks]
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


def pretrain_with_two_gpus():
    torch.cuda.device_count = lambda: 2
    torchrun.torchrun.run = forked_workers  # torchrun itself: below
    main()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--criterion=masked_lm_chunked", "--optimizer=adamw_fused"], marks=pytest.mark.thorough),
    ],
)
def test_two_processes_equal_one_with_twice_the_steps(options, data, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert len(train(pretrain_arguments(data, one, *QUIET, "--update-freq=2"))) == 6
    process = fork(pretrain_with_two_gpus, "tupe", "pretrain", *words(data, two, *options))
    process.join()
    assert process.exitcode == 0
    compare(one, two)


def compare(one, two):
    """The run of one process and that of two."""
    single, double = (load(folder / "checkpoint_last.pt") for folder in (one, two))
    for key, value in single["model"].items():
        torch.testing.assert_close(double["model"][key], value, rtol=2e-5, atol=1e-5)
    losses = [[entry["loss"] for entry in read(folder).scores] for folder in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5) and len(losses[0]) > 0
    assert state_of(two) == "finished" and "pretrain" in read(two).command and "--gpus=2" in read(two).command

    # In the middle of an epoch.
    state = double["extra_state"]["train_iterator"]
    assert (state["iterations_in_epoch"], state["epoch"]) == (1, 2)


@pytest.mark.slow
def test_a_finished_run_is_left_alone_and_a_busy_folder_has_its_status(data, tmp_path):
    assert start(data, tmp_path).returncode == 0
    finished = (tmp_path / "checkpoint_last.pt").read_bytes(), (tmp_path / "record.json").read_text()
    assert start(data, tmp_path).returncode == 0
    with locked(tmp_path / "lock"):
        assert start(data, tmp_path).returncode == BUSY
    assert finished == ((tmp_path / "checkpoint_last.pt").read_bytes(), (tmp_path / "record.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, number",
    [
        ("torchrun", signal.SIGTERM), ("one process", signal.SIGHUP), ("all", signal.SIGUSR1),
    ],
)  # fmt: skip
def test_a_signal_to_any_process_stops_all(data, tmp_path, target, number):
    """What torchrun passes on. Data workers get the signal too where it goes to all, as Slurm sends it."""
    more = ["--max-update=5000", "--total-num-update=5000", "--log-interval=1", "--disable-validation"]
    process = subprocess.Popen(
        **command(data, tmp_path, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert any("num_updates=5," in line for line in process.stdout)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    targets = {"torchrun": [process.pid], "one process": children[1:2]}
    for pid in targets.get(target) or descendants(process.pid):
        os.kill(int(pid), number)
    process.communicate()
    assert process.returncode == STOPPED
    updates = load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 5 <= updates < 5000 and state_of(tmp_path) == "open"


def train_two(data, folder, *more, killed_at=None):
    """Train in two copies of this process, as in the processes of torchrun -> their exit statuses. killed_at: number of
    updates after which both are killed."""
    arguments = pretrain_arguments(data, folder, *QUIET, "--num-workers=0", *more, processes=2)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["TORCHELASTIC_RUN_ID"] = "none"

    def run():
        step = TupeMaskedLMTask.train_step

        def killed(task, *args, update_num, **more):
            if update_num == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(task, *args, update_num=update_num, **more)

        TupeMaskedLMTask.train_step = killed
        launch.train(parsed(arguments))

    processes = [fork(run, "tupe", RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@pytest.mark.thorough
def test_a_run_goes_on_with_other_processes_and_batches(data, tmp_path):
    """Killed: the same losses, whatever divides an update, because the blocks and masks are the same."""
    words = ["--dropout=0", "--attention-dropout=0", "--num-workers=0", "--total-num-update=14"]

    def go_on(updates, *more):
        return train(pretrain_arguments(data, tmp_path / "parts", *words, f"--max-update={updates}", *more))

    whole = train(pretrain_arguments(data, tmp_path / "whole", *words))
    found = go_on(5, "--batch-size=1", "--update-freq=4")
    longer = ["--batch-size=2", "--max-update=14", "--save-interval-updates=1"]
    assert train_two(data, tmp_path / "parts", *longer, killed_at=7) == [-signal.SIGKILL, -signal.SIGKILL]
    found += whole[5:7] + go_on(14, "--batch-size=2", "--update-freq=2")
    assert len(found) == 14
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in whole], rel=1e-5)
    one, two = (read(tmp_path / name).scores for name in ("whole", "parts"))
    scored = {entry["num_updates"]: entry["loss"] for entry in two}
    assert all(scored[entry["num_updates"]] == pytest.approx(entry["loss"], rel=1e-5) for entry in one)


def test_other_processes_in_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, --gpus and --nodes make 1: unset it"):
        torchrun.check_environment(1)


PASSES = ["--batch-size=1", "--update-freq=4", "--max-update=10"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Folder of an undisturbed run of 10 updates with two processes: two epochs and a bit."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_two(data, folder, *PASSES) == [0, 0]
    return folder


@pytest.mark.parametrize(
    ("rank", "number", "update"),
    [
        (1, signal.SIGUSR1, 4), pytest.param(1, signal.SIGHUP, 5, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_a_signal_to_one_process_stops_both_at_one_update(data, whole, tmp_path, monkeypatch, rank, number, update):
    """In the first pass of an update, of four, and of the last one of an epoch (5), which has fewer: it is dropped,
    unless a process is in its last pass already. The other process never receives a signal."""
    step, begun = TupeMaskedLMTask.train_step, []

    def train_step(self, *args, **kwargs):
        begun.append(kwargs["update_num"] + 1)
        if int(os.environ["RANK"]) == rank and begun.count(update) == 1 and begun[-1] == update:
            os.kill(os.getpid(), number)
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TupeMaskedLMTask, "train_step", train_step)
        assert train_two(data, tmp_path, *PASSES) == [STOPPED, STOPPED]
    state = load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] in (update - 1, update)
    assert state_of(tmp_path) == "open" and read(tmp_path).failure["status"] == STOPPED
    assert train_two(data, tmp_path, *PASSES) == [0, 0]
    one, two = (load(folder / "checkpoint_last.pt")["model"] for folder in (tmp_path, whole))
    assert all(torch.equal(one[key], two[key]) for key in one) and read(tmp_path).scores == read(whole).scores
