"""Sweeps: every job once, in a process of its own, whatever fails, is killed, or is started twice."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tupe.experiments.runner import read_failure
from tupe.experiments.sweep import Sweep, read_sweep, state_of
from tupe.plugin.finetune import read_result

# Stands in for fairseq-train: locks its folder, notes that it ran, and does what the folder's `behave` file says.
JOB = """
import fcntl, json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
lock = open(folder / "lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(f"another process is training in {folder}")
with open(folder.parent.parent / "ran", "a") as ran:
    ran.write(f"{folder.name} {os.getpid()}\\n")
behave = (folder / "behave").read_text() if (folder / "behave").exists() else ""
if behave.startswith("exec "):
    exec(behave[5:])
time.sleep(float(sys.argv[3]))
(folder / "checkpoint_best.pt").write_text(folder.name)
score = 50.0 + len(folder.name) + int(folder.name[-1])
record = {"epoch": 1, "num_updates": 1, "split": "valid", "loss": 0.1, "accuracy": score, "best": True}
result = {"max_epoch": 1, "splits": ["valid"], "metrics": ["accuracy"], "records": [record]}
(folder / "scores.json").write_text(json.dumps(result))
"""
CPU = [{"OMP_NUM_THREADS": "1"}]


@pytest.fixture
def checkpoint(tmp_path):
    model = {"_name": "tupe_r_tiny", "encoder_layers": 2, "dropout": 0.3}
    state = {"cfg": {"model": model}, "optimizer_history": [{"num_updates": 7}]}
    torch.save(state, tmp_path / "checkpoint.pt")
    for task in ("RTE", "CoLA"):
        (tmp_path / "data" / task).mkdir(parents=True)
    return tmp_path / "checkpoint.pt"


def make(checkpoint, tasks=("RTE",), lrs=(2e-5,), seeds=(1, 2), name="out", seconds=0.0, **options):
    made = Sweep(checkpoint, checkpoint.parent / "data", checkpoint.parent / name, tasks, lrs, seeds, **options)
    made.command = lambda job: [sys.executable, "-c", JOB, str(job.folder), "", str(seconds)]
    return made


def ran(made):
    path = made.output / "ran"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def behave(made, index, code):
    made.jobs[index].folder.mkdir(parents=True)
    (made.jobs[index].folder / "behave").write_text("exec " + code)


def quiet(line):
    pass


def test_every_job_runs_once_and_in_its_own_process(checkpoint):
    made = make(checkpoint, ["cola", "RTE"], (2e-5, 3e-5), (1, 2))
    assert set(made.run(CPU * 2, say=quiet).values()) == {"done"}
    lines = (made.output / "ran").read_text().splitlines()
    assert len(lines) == len({line.split()[1] for line in lines}) == 8
    assert {job.folder.relative_to(made.output).as_posix() for job in made.jobs} == {
        f"{task}/lr{lr}_seed{seed}" for task in ("CoLA", "RTE") for lr in ("2e-05", "3e-05") for seed in (1, 2)
    }
    again = make(checkpoint, ["cola", "RTE"], (2e-5, 3e-5), (1, 2))
    assert set(again.run(CPU, say=quiet).values()) == {"done"} and len(ran(again)) == 8


def test_seeds_come_last_so_that_a_cut_sweep_covers_all_tasks(checkpoint):
    jobs = make(checkpoint, ["CoLA", "RTE"], (2e-5, 3e-5), (1, 2)).jobs
    assert [(job.task, job.seed) for job in jobs[:4]] == [("CoLA", 1), ("CoLA", 1), ("RTE", 1), ("RTE", 1)]


def test_a_failed_job_is_reported_and_stops_no_other(checkpoint):
    made = make(checkpoint, seeds=(1, 2, 3))
    behave(made, 0, "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')")
    behave(made, 1, "raise FloatingPointError('gradients are Nan/Inf')")
    said = []
    states = made.run(CPU, say=said.append)
    assert list(states.values()) == ["failed", "failed", "done"]
    assert read_failure(made.jobs[0].folder)["reason"] == "out of memory"
    assert read_failure(made.jobs[1].folder)["reason"] == "diverged"
    assert any("FAILED (out of memory)" in line for line in said)
    assert len(ran(made)) == 3
    assert (
        make(checkpoint, seeds=(1, 2, 3)).run(CPU, say=quiet) == states and len(ran(made)) == 3
    )  # not again by itself
    (made.jobs[0].folder / "behave").unlink()
    states = make(checkpoint, seeds=(1, 2, 3)).run(CPU, retry_failed=True, say=quiet)
    assert list(states.values()) == ["done", "failed", "done"] and len(ran(made)) == 5


def test_a_killed_job_runs_again_with_the_next_start(checkpoint):
    made = make(checkpoint)
    behave(made, 0, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert list(made.run(CPU, say=quiet).values()) == ["failed", "done"]
    assert read_failure(made.jobs[0].folder)["reason"] == "killed by signal 9"
    (made.jobs[0].folder / "behave").unlink()
    assert list(make(checkpoint).run(CPU, say=quiet).values()) == ["done", "done"]
    assert not (made.jobs[0].folder / "failed.json").exists()


def test_a_job_with_an_unreadable_result_runs_again(checkpoint):
    made = make(checkpoint)
    made.run(CPU, say=quiet)
    (made.jobs[0].folder / "scores.json").write_text('{"records": [')
    assert [state_of(job) for job in made.jobs] == ["open", "done"]
    assert list(make(checkpoint).run(CPU, say=quiet).values()) == ["done", "done"] and len(ran(made)) == 3


def test_two_sweeps_on_one_folder_share_the_work(checkpoint):
    first, second = (make(checkpoint, seeds=(1, 2, 3, 4), seconds=0.3) for _ in range(2))
    states = []
    threads = [threading.Thread(target=lambda s=s: states.append(s.run(CPU, say=quiet))) for s in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(each.values()) for each in states] == [{"done"}, {"done"}]
    assert sorted(ran(first)) == [f"lr2e-05_seed{seed}" for seed in (1, 2, 3, 4)]


def start_in_a_process(checkpoint, folder):
    """Three jobs of four seconds, and the process that runs them; returns when the first one is under way."""
    script = folder / "sweep_in_a_process.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from pathlib import Path\nimport test_sweep as t\nfrom tupe.experiments.sweep import end_cleanly_on_sigterm\n"
        "end_cleanly_on_sigterm()\n"
        f"t.make(Path({str(checkpoint)!r}), seeds=(1, 2, 3), seconds=4.0).run(t.CPU, say=t.quiet)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    made = make(checkpoint, seeds=(1, 2, 3))
    while not ran(made) and process.poll() is None:
        time.sleep(0.02)
    return made, process


def test_a_killed_sweep_continues_and_waits_for_its_orphan(checkpoint, tmp_path):
    """kill -9 of the sweep: its running job lives on, is not run twice, and the rest follows."""
    made, process = start_in_a_process(checkpoint, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [state_of(job) for job in made.jobs] == ["running", "open", "open"]
    assert set(made.run(CPU, say=quiet).values()) == {"done"}
    assert sorted(ran(made)) == [f"lr2e-05_seed{seed}" for seed in (1, 2, 3)]


def test_a_terminated_sweep_ends_with_its_jobs(checkpoint, tmp_path):
    made, process = start_in_a_process(checkpoint, tmp_path)
    process.terminate()
    assert "start it again to go on" in process.communicate()[1] and process.returncode == 1
    assert [state_of(job) for job in made.jobs] == ["open", "open", "open"]


def test_stopping_a_sweep_stops_its_jobs_and_leaves_them_open(checkpoint, monkeypatch):
    made, sleep = make(checkpoint, seconds=60), time.sleep

    def interrupted(seconds):
        sleep(seconds)
        if ran(made):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(time, "sleep", interrupted)
        made.run(CPU, say=quiet)
    assert [state_of(job) for job in made.jobs] == ["open", "open"]


def test_no_checkpoint_is_left_behind(checkpoint):
    made = make(checkpoint, seeds=(1, 2, 3))
    behave(made, 2, "(folder / 'crash.pt').write_text('big'); raise RuntimeError('boom')")
    made.run(CPU, say=quiet)
    assert not list(made.output.rglob("*.pt"))
    assert read_failure(made.jobs[2].folder)["reason"] == "RuntimeError: boom"


def test_the_best_checkpoint_of_each_task_is_kept_on_request(checkpoint):
    made = make(checkpoint, seeds=(1, 3, 2), keep_best=True)
    made.run(CPU, say=quiet)
    (kept,) = made.output.rglob("*.pt")
    assert kept == made.output / "RTE" / "checkpoint_best.pt" and kept.read_text() == "lr2e-05_seed3"
    best = json.loads((made.output / "RTE" / "best.json").read_text())
    assert best["run"] == "lr2e-05_seed3"
    assert best["score"] == read_result(made.output / "RTE" / "lr2e-05_seed3")["records"][0]["accuracy"]


def test_a_folder_of_another_sweep_is_refused(checkpoint):
    make(checkpoint)
    with pytest.raises(ValueError, match=r"holds another sweep \(options \[\] there, \['--fp16'\] here\)"):
        make(checkpoint, options=["--fp16"])
    make(checkpoint, ["CoLA"], (3e-5,), (5,))  # more of the same is welcome
    settings, jobs = read_sweep(checkpoint.parent / "out")
    assert settings["tasks"] == ["RTE", "CoLA"] and settings["seeds"] == [1, 2, 5] and len(jobs) == 2 * 2 * 3
    with pytest.raises(ValueError, match="--lr=1: the sweep decides"):
        make(checkpoint, options=["--fp16", "--lr=1"])
    with pytest.raises(ValueError, match="keep_best False there, True here"):
        make(checkpoint, keep_best=True)
    with pytest.raises(ValueError, match="has no data for QNLI"):
        make(checkpoint, ["QNLI"])
    with pytest.raises(ValueError, match="not the folder of a sweep"):
        read_sweep(checkpoint.parent)


def test_a_sweep_without_tasks_is_refused_and_writes_nothing(checkpoint):
    """As scripts/sweep_glue.py finds them where the data folder is mistyped."""
    with pytest.raises(ValueError, match="typo has no prepared task"):
        Sweep(checkpoint, checkpoint.parent / "typo", checkpoint.parent / "out", [])
    assert not (checkpoint.parent / "out").exists()


def test_command_is_the_recipe(checkpoint, monkeypatch):
    made = Sweep(
        checkpoint, checkpoint.parent / "data", checkpoint.parent / "out", ["CoLA"], (2e-5,), (3,), ["--dropout=0.3"]
    )
    made.slots = CPU
    words = made.command(made.jobs[0])
    assert words[:3] == [sys.executable, "-m", "fairseq_cli.train"]
    for word in ("--glue-task=CoLA", "--arch=tupe_r_tiny", "--max-epoch=10", "--batch-size=32", "--warmup-ratio=0.06"):
        assert word in words
    for word in ("--no-save", "--cpu", "--seed=3", "--lr=[2e-05]", "--dropout=0.3", "--encoder-layers=2"):
        assert word in words
    assert "--fp16" not in words  # no GPU
