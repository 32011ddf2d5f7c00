"""Sweeps: what belongs to one, the commands of its jobs, and what is left of them."""

import itertools
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import finetune, fork, least_checkpoint, wait_until

from tupe.run import record
from tupe.sweep import runner
from tupe.sweep.grid import Sweep, command, options_in, parse_grid

STAND_IN = Path(__file__).parents[1] / "stand_in.py"
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Jobs are processes of tests/stand_in.py."""
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(STAND_IN)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def place(tmp_path):
    """A folder with a checkpoint, and data of two tasks."""
    pytest.importorskip("fairseq")  # whose registries the gate for a checkpoint's file asks
    torch.save(least_checkpoint(7), tmp_path / "pretrained.pt")
    for task in ("CoLA", "SST-2"):
        (tmp_path / "data" / task / "input0").mkdir(parents=True)
        (tmp_path / "data" / task / "manifest.json").touch()
    return tmp_path


def sweep(place, *words, output="out", status=0):
    """`tupe sweep` of fine-tuning; returns what it prints."""
    started = CliRunner().invoke(
        command,
        [f"--output={place / output}", f"--data={place / 'data'}", f"--checkpoint={place / 'pretrained.pt'}", *words],
    )
    assert started.exit_code == status, started.output
    return started.output


def starts(place, output="out"):
    """{name of a job: how often it was started}"""
    paths = (place / output).rglob("starts")
    return {str(path.parent.relative_to(place / output)): len(path.read_text().split()) for path in paths}


ONE_TASK = ("--grid=task=CoLA", "--grid=lr=2e-5")


# ---------------------------------------------------------------------------------------------------------------- grid


def test_fine_tuning_s_default_is_the_paper_s_search_of_every_prepared_task(place):
    lines = sweep(place, "--dry-run").splitlines()
    jobs = [re.search(r"--task=(\S+) --lr=(\S+) --seed=(\S+) --output=(\S+)", line).groups() for line in lines]
    rates, seeds = ("2e-05", "3e-05", "4e-05", "5e-05"), ("1", "2", "3", "4", "5")
    expected = itertools.product(seeds, ("CoLA", "SST-2"), rates)  # cut short, it has fewer seeds, not fewer tasks
    assert [values[:3] for values in jobs] == [(task, lr, seed) for seed, task, lr in expected]
    assert {values[3] for values in jobs} == {
        str(place / "out" / task / f"lr{lr}_seed{seed}") for task, lr, seed, _ in jobs
    }
    assert not (place / "out").exists()


def test_rates_and_seeds_in_the_spelling_of_the_recipe_replace_the_paper_s(place):
    words = ["--grid=task=CoLA", "optimization.lr=[1e-5]", "--grid=common.seed=7,8"]
    lines = sweep(place, "--dry-run", *words).splitlines()
    assert len(lines) == 2 and all("optimization.lr=[1e-5]" in line for line in lines)
    assert not any("--lr" in line or "--seed" in line for line in lines)


def test_job_is_the_command_that_a_person_would_paste(place):
    (line,) = sweep(
        place, *ONE_TASK, "--grid=seed=3", "--dry-run",
        "--max-epoch", "2", "--cpu", "model.dropout=0.3", "--clip-norm=0",
    ).splitlines()  # fmt: skip
    assert line.split() == [
        sys.executable, str(STAND_IN), "finetune", "--task=CoLA", "--lr=2e-05", "--seed=3",
        f"--output={place / 'out/CoLA/lr2e-05_seed3'}", f"--data={place / 'data'}",
        f"--checkpoint={place / 'pretrained.pt'}", "--max-epoch=2", "--cpu", "model.dropout=0.3", "--clip-norm=0",
        "--no-save",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "recipe, grid, command, folders",
    [
        ("pretrain", ["preset=rope,alibi"], "pretrain --preset=rope", ["rope", "alibi"]),
        ("pretrain_electra", ["seed=1,2"], "pretrain --seed=1", ["seed1", "seed2"]),
        (
            "pretrain", ["seed=1,2", "arch=bert_a,tupe_r", "model.dropout=0.1"],
            "pretrain --arch=bert_a model.dropout=0.1 --seed=1",
            [f"{arch}_dropout0.1_seed{seed}" for seed in (1, 2) for arch in ("bert_a", "tupe_r")],
        ),
        ("pretrain", ["position=t5:buckets:8+rope", "adam_betas=(0.9,0.98),(0.9,0.999)"],
         "pretrain --adam-betas=(0.9,0.98) --position=t5:buckets:8+rope",
         ["adam-betas-0.9-0.98-_t5:buckets:8+rope", "adam-betas-0.9-0.999-_t5:buckets:8+rope"]),
    ],
)  # fmt: skip
def test_grids_of_other_recipes(tmp_path, recipe, grid, command, folders):
    jobs = Sweep.plan(recipe, tmp_path, parse_grid(grid)).jobs
    assert [job.folder.relative_to(tmp_path).as_posix() for job in jobs] == folders
    assert " ".join(jobs[0].command[2:]).startswith(f"{command} --output={jobs[0].folder}")
    assert ("--recipe=pretrain_electra" in jobs[0].command) == (recipe == "pretrain_electra")
    assert "--no-save" not in jobs[0].command


def test_every_job_has_a_curve_of_its_own(tmp_path):
    jobs = Sweep.plan("pretrain", tmp_path, parse_grid(["seed=1,2"]), ["--tensorboard-logdir=curves"]).jobs
    assert [[word for word in job.command if "curves" in word] for job in jobs] == [
        [f"--tensorboard-logdir={Path('curves').resolve()}/seed{seed}"] for seed in (1, 2)
    ]


def test_a_number_has_one_spelling(tmp_path):
    for text in ("2e-5", "0.00002", "2E-05"):
        (job,) = Sweep.plan("pretrain", tmp_path, {"lr": [text]}).jobs
        assert job.folder == tmp_path / "lr2e-05" and "--lr=2e-05" in job.command
    (job,) = Sweep.plan("pretrain", tmp_path, {"max_update": ["1000000"]}).jobs
    assert "--max-update=1000000" in job.command


def test_words_are_options_or_overrides():
    words = [
        "--data",
        "d",
        "--cpu",
        "model.dropout=0",
        "--lr",
        "-1",
        "--betas=(0.9, 0.98)",
        "+a.b=c",
        "model=rope",
    ]
    assert options_in(words) == {
        "--data": str(Path("d").resolve()), "--cpu": None, "model.dropout": "0", "--lr": "-1",
        "--betas": "(0.9, 0.98)", "+a.b": "c", "model": "rope",
    }  # fmt: skip
    words = ["--checkpoint", "m/seed=1", "--tensorboard-logdir", "lr=1", "--cpu", "model.dropout=0"]
    assert list(options_in(words)) == [
        "--checkpoint",
        "--tensorboard-logdir",
        "--cpu",
        "model.dropout",
    ]
    assert options_in(["--checkpoint=/x/a:b/c.pt"])["--checkpoint"] == "/x/a:b/c.pt"
    with pytest.raises(ValueError, match="'DATA' is neither"):
        options_in(["--lr=1", "DATA"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--grid=task=CoLA,QNLI"], "holds no data for QNLI; prepared: CoLA, SST-2"),
        (["--grid=lr"], "--grid lr: give each name once"),
        (["--grid=lr=2e-5,0.00002"], "two jobs would share a folder"),
        (["--grid=lr=1", "--lr=2"], "--lr is set by the sweep"),
        (["--grid=lr=1", "optimization.lr=[2]"], "optimization.lr is set by the sweep"),
        (["--grid=lr=1", "--grid=optimization.lr=[2]"], "give each option once"),
        (["--grid=output=a,b"], "--output is set by the sweep"),
        (["--save-dir=x"], "--save-dir is set by the sweep"),
        (["--recipe=pretrain"], "no --grid"),
        (["--recipe=pretrian_small", "--grid=seed=1", "--dry-run"], "did you mean 'pretrain_small'?"),
        (["--data"], "--data needs a path behind it"),
        (["--recipe=pretrain", "--grid=seed=1", "--tensorboard-logdir"], "--tensorboard-logdir needs a path"),
        (["--data=nowhere"], "nowhere holds no prepared task"),
        (["--recipe=pretrain", "--grid=seed=1,2", "--report"], "--report is of fine-tunings, and --recipe pretrain"),
        (["--arhc=bert_a"], "no such option --arhc"),  # what the first job's command says
    ],
)
def test_mistakes_are_refused_before_anything_is_written(place, words, message):
    assert message in sweep(place, *words, status=2)
    assert not (place / "out").exists()


def test_a_folder_of_another_sweep_is_refused_and_a_wider_grid_extends_it(place):
    sweep(place, *ONE_TASK, "--grid=seed=1")
    for words, difference in (
        (["--cpu"], "--cpu none there, given here"),
        (["--grid=max-epoch=1"], "grid over --task --lr --seed there, --task --lr --max-epoch --seed here"),
    ):
        assert difference in sweep(place, *ONE_TASK, "--grid=seed=1", *words, status=2)
    sweep(place, "--grid=task=cola,sst2", "--grid=lr=2e-5", "--grid=seed=2")
    expected = {"CoLA/lr2e-05_seed1", "CoLA/lr2e-05_seed2", "SST-2/lr2e-05_seed2"}
    assert starts(place) == dict.fromkeys(expected, 1)
    jobs = Sweep.read(place / "out").jobs
    assert {job.name for job in jobs} == expected | {"SST-2/lr2e-05_seed1"}
    assert Sweep.read(place) is None
    (place / "out" / "sweep.json").write_text('{"tasks": []}')
    with pytest.raises(ValueError, match="sweep.json does not describe a sweep"):
        Sweep.read(place / "out")


def test_files_of_a_grid_are_known_by_their_whole_paths(place, monkeypatch):
    for name in ("a", "b"):
        (place / name / "runs").mkdir(parents=True)
        (place / name / "runs" / "last.pt").write_bytes((place / "pretrained.pt").read_bytes())
    monkeypatch.chdir(place / "a")
    grid = {"checkpoint": ["runs/last.pt"], "task": ["CoLA"], "lr": ["2e-5"], "seed": ["1"]}
    first = Sweep.plan("finetune", place / "out", grid, [f"--data={place / 'data'}"])
    first.save()
    assert first.grid["--checkpoint"] == [str(place / "a" / "runs" / "last.pt")]
    monkeypatch.chdir(place / "b")
    other = Sweep.plan("finetune", place / "out", grid, [f"--data={place / 'data'}"])
    with pytest.raises(ValueError, match="two jobs would share a folder of .*out, named by the last two parts"):
        other.save()
    assert Sweep.read(place / "out").grid == first.grid
    further = Sweep.plan("pretrain_further", place / "out", {"seed": ["1"]}, ["--finetune-from-model=runs/last.pt"])
    assert further.common == {"--finetune-from-model": str(place / "b" / "runs" / "last.pt")}


# ------------------------------------------------------------------------------------------------------------- running


def test_every_job_is_run_once_and_no_checkpoint_is_left(place):
    words = ("--grid=task=CoLA,SST-2", "--grid=lr=2e-5,3e-5", "--grid=seed=1,2", "--jobs=2")
    assert "8/8" in sweep(place, *words)
    assert "8 finished, 0 failed; 0 to run" in sweep(place, *words)
    assert list(starts(place).values()) == [1] * 8
    assert not list((place / "out").rglob("*.pt"))


def test_a_report_is_written_on_request(place):
    sweep(place, *ONE_TASK, "--grid=seed=1", "--report")
    assert (place / "out" / "report" / "report.md").exists()


def test_failed_jobs_are_reported_and_run_again_on_request(place):
    folder = place / "out/CoLA/lr2e-05_seed1"
    folder.mkdir(parents=True)
    (folder / "behave.py").write_text("sys.exit(3)")
    words = (*ONE_TASK, "--grid=seed=1,2")
    for options, count in ((), 1), ((), 1), (("--retry-failed",), 2):
        printed = sweep(place, *words, *options, status=1)
        assert "1 of 2 jobs did not finish: CoLA/lr2e-05_seed1" in printed
        assert ("FAILED (exit status 3), see " in printed) == (options != () or "0 failed" in printed)
        assert starts(place) == {"CoLA/lr2e-05_seed1": count, "CoLA/lr2e-05_seed2": 1}
    assert not list((place / "out").rglob("*.pt"))
    (folder / "behave.py").unlink()
    sweep(place, *words, "--retry-failed")
    assert record.state_of(folder) == "finished"


def test_checkpoints_of_pre_training_stay(place):
    started = CliRunner().invoke(command, ["--recipe=pretrain", f"--output={place / 'out'}", "--grid=seed=1,2"])
    assert started.exit_code == 0, started.output
    assert len(list(place.glob("out/seed*/checkpoint_last.pt"))) == 2


def test_a_terminated_sweep_leaves_nothing_running_and_can_be_resumed(place):
    folder = place / "out/CoLA/lr2e-05_seed1"
    folder.mkdir(parents=True)
    (folder / "behave.py").write_text("time.sleep(600)")
    words = [f"--output={place / 'out'}", f"--data={place / 'data'}", f"--checkpoint={place / 'pretrained.pt'}"]
    process = fork(command, "sweep", *words, *ONE_TASK, "--grid=seed=1,2")
    wait_until((folder / "starts").exists)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert not Path("/proc", (folder / "starts").read_text().strip()).exists()
    assert record.state_of(folder) == "open"
    (folder / "behave.py").unlink()
    sweep(place, *ONE_TASK, "--grid=seed=1,2")
    assert starts(place) == {"CoLA/lr2e-05_seed1": 2, "CoLA/lr2e-05_seed2": 1}


@pytest.mark.thorough
def test_real_runs(learnable, pretrained, tmp_path, monkeypatch):
    """Two fine-tunings and their report; started again, neither is run again. Each scores and predicts as a run
    does that no sweep started."""
    words = ["--data", learnable, "--checkpoint", pretrained, "--output", tmp_path / "out", "--grid", "task=cola"]
    words += ["--grid", "lr=1e-3", "--grid", "seed=1,2", "--jobs", "2", "--num-workers", "0", "--max-epoch=2"]
    words = list(map(str, words))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent))
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, "-m", "tupe"))
    monkeypatch.setattr(runner, "check", lambda job, slot: None)  # a process more
    done = CliRunner().invoke(command, [*words, "--report"])
    assert done.exit_code == 0 and "2 to run" in done.output, done.output
    repeated = CliRunner().invoke(command, words)
    assert repeated.exit_code == 0 and "0 to run" in repeated.output
    runs = [record.read(tmp_path / "out/CoLA" / f"lr0.001_seed{seed}") for seed in (1, 2)]
    assert [(run.state, run.seed, len(run.scores)) for run in runs] == [("finished", 1, 2), ("finished", 2, 2)]
    assert all(
        run.lr == 1e-3 and run.pretrained == str(pretrained) and "finetune --task=CoLA" in run.command for run in runs
    )
    assert "CoLA" in (tmp_path / "out/report/report.md").read_text()
    assert not list(tmp_path.rglob("*.pt"))
    threads = torch.get_num_threads()
    torch.set_num_threads(int(runner.slots(2)[0]["OMP_NUM_THREADS"]))
    for seed, run in enumerate(runs, 1):
        here, there = tmp_path / f"here{seed}", tmp_path / "out/CoLA" / f"lr0.001_seed{seed}"
        finetune(
            learnable, pretrained, here, "glue=cola", "optimization.max_epoch=2", "optimization.lr=[0.001]",
            f"common.seed={seed}", "checkpoint.no_save=true", "dataset.batch_size=32",
        )  # fmt: skip
        assert run.scores == record.read(here).scores
        for file in ("predictions/valid_best.tsv", "predictions/valid_last.tsv"):
            assert (there / file).read_text() == (here / file).read_text()
        assert "begin training epoch 2" in (there / "train.log").read_text()
    torch.set_num_threads(threads)
