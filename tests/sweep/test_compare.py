"""Comparisons: every encoding is pre-trained alike and fine-tuned; mistakes are refused before anything is trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import least_checkpoint

from tupe.run import record
from tupe.sweep import runner
from tupe.sweep.compare import command, losses_table
from tupe.sweep.grid import Sweep

STAND_IN = Path(__file__).parents[1] / "stand_in.py"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Data for pre-training and GLUE. Jobs are processes of tests/stand_in.py."""
    for folder in ("data", "glue/CoLA/input0", "glue/SST-2/input0", "other"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("glue/CoLA/manifest.json", "glue/SST-2/manifest.json"):
        (tmp_path / file).touch()
    for folder in ("data", "glue", "other"):
        (tmp_path / folder / "dict.txt").write_text("another 1\n" if folder == "other" else "word 1\n")
    torch.save(least_checkpoint(7), tmp_path / "data" / "checkpoint.pt")
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(STAND_IN)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("tupe.sweep.compare.write_report", lambda runs, *places: print("report", *places))
    return tmp_path


def compare(place, *words, status=0):
    started = CliRunner().invoke(command, [f"--data={place / 'data'}", f"--output={place / 'out'}", *words])
    assert started.exit_code == status, started.output
    return started.output


def starts(place):
    return {
        str(path.parent.relative_to(place / "out")): len(path.read_text().split())
        for path in (place / "out").rglob("starts")
    }


def words_of(folder):
    return (folder / "train.log").read_text().splitlines()[0].split()


@pytest.mark.thorough
def test_every_encoding_is_pre_trained_alike_and_fine_tuned(place):
    pytest.importorskip("fairseq")
    words = [
        "--presets=shaw,tupe_a", "--position=t5+rope", "--jobs=2", f"--glue={place / 'glue'}",
        "--tasks=cola,SST-2", "--lrs=3e-5,5e-5", "--seeds=1,2",
        "--finetune-options=--max-epoch 3", "--max-update", "5", "task.mask_prob=0.2",
    ]  # fmt: skip
    pretraining = {
        "shaw": "presets/bert_a_tiny/shaw",
        "tupe_a": "presets/tupe_a_tiny/tupe_a",
        "t5+rope": "positions/bert_a_tiny/t5+rope",
    }
    fine_tuning = [
        f"glue/{name}/{task}/lr{lr}_seed{seed}"
        for name in pretraining for task in ("CoLA", "SST-2") for lr in ("3e-05", "5e-05") for seed in (1, 2)
    ]  # fmt: skip
    printed = compare(place, *words)
    assert f"report {place / 'out/report'}" in printed
    assert starts(place) == dict.fromkeys([*pretraining.values(), *fine_tuning], 1)
    for name, folder in pretraining.items():
        given = words_of(place / "out" / folder)
        assert {"pretrain", "--max-update=5", "task.mask_prob=0.2", f"--data={place / 'data'}"} <= set(given)
        assert f"--arch={Path(folder).parent.name}" in given
        assert f"--{folder.partition('s/')[0]}={name}" in given
        given = words_of(place / "out" / "glue" / name / "CoLA" / "lr3e-05_seed1")
        assert f"--checkpoint={place / 'out' / folder}/checkpoint_last.pt" in given and "--max-epoch=3" in given
    assert not list((place / "out" / "glue").rglob("*.pt"))

    modified = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*.pt")}
    compare(place, *words)  # nothing is run again, no checkpoint is touched
    assert set(starts(place).values()) == {1}
    assert modified == {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*.pt")} and len(modified) == 6


def test_mistakes_in_options_of_the_trainings_are_refused_first(place):
    presets = "--presets=shaw,alibi"
    (place / "out" / "presets" / "bert_a_tiny").mkdir(parents=True)
    refused = compare(place, presets, "--arhc=bert_a", status=2)
    assert "no such option --arhc" in refused and not list(place.glob("out/**/sweep.json"))
    glue = [f"--glue={place / 'glue'}", "--finetune-options=--arhc=x"]
    refused = compare(place, presets, *glue, status=2)  # before anything is trained
    assert "no such option --arhc" in refused and not list(place.glob("out/**/sweep.json"))
    refused = compare(place, presets, glue[0], "--finetune-options=--lr 1e-4", status=2)
    assert "--lr is set by this command, see --tasks, --lrs" in refused and not list(place.glob("out/**/sweep.json"))
    printed = compare(place, presets, "--jobs=2")
    assert "| presets/bert_a_tiny/shaw | 5.000 |" in printed and len(starts(place)) == 2


def test_losses_are_means_over_seeds(place):
    compare(place, "--position=rope", "--pretraining-seeds=1,2")
    assert starts(place).keys() == {f"positions/bert_a_tiny/rope_seed{seed}" for seed in (1, 2)}
    row = "| positions/bert_a_tiny/rope | 5.000 | 0.00 | 2 | ? |"
    assert row in (place / "out" / "losses.md").read_text()
    (line,) = (place / "out" / "losses.csv").read_text().splitlines()[1:]
    assert line == "positions/bert_a_tiny/rope,5.000,0.00,2,?"


@pytest.mark.parametrize("task, marks", [("masked_lm", ["0", "1", "2"]), ("electra", ["?", "?", "?"])])
def test_runs_that_are_still_on_the_plateau_are_counted(tmp_path, task, marks):
    """They are not half a bit below the mean of those without positions, 9.1. Nats of ELECTRA do not compare."""
    jobs = []
    for name, losses in {"nopos": (9.0, 9.2), "t5": (8.9, 8.5), "rope": (6.0, 6.0)}.items():
        for seed, loss in enumerate(losses, 1):
            run = record.Record(task if name == "rope" else "masked_lm", seed=seed, scores=[{"loss": loss}])
            jobs.append(runner.Job(f"positions/{name}_seed{seed}", tmp_path / f"{name}{seed}", ()))
            jobs[-1].folder.mkdir()
            run.save(jobs[-1].folder)
    rows = [cells for _, cells in losses_table(jobs).rows]
    assert [cells[0] for cells in rows] == ["positions/rope", "positions/t5", "positions/nopos"]
    assert rows[1][1:4] == ["8.700", "0.28", "2"] and [cells[4] for cells in rows] == marks


def test_an_encoding_whose_pre_training_fails_is_left_out(place):
    pytest.importorskip("fairseq")
    folder = place / "out/presets/bert_a_tiny/rope"
    folder.mkdir(parents=True)
    (folder / "behave.py").write_text("run.end('diverged'); run.save(folder); sys.exit(1)")
    words = ["--presets=rope,alibi", f"--glue={place / 'glue'}", "--tasks=CoLA", "--seeds=1"]
    printed = compare(place, *words, status=1)
    assert "FAILED (diverged)" in printed and "1 of 3 jobs did not finish: presets/bert_a_tiny/rope" in printed
    assert Sweep.read(place / "out/glue/alibi") and not (place / "out/glue/rope").exists()
    (folder / "behave.py").unlink()
    compare(place, *words, "--retry-failed")
    assert record.state_of(place / "out/glue/rope/CoLA/lr5e-05_seed1") == "finished"


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to compare: give --position NAME"),
        (["--presets=shaw,sahw"], "unknown preset 'sahw'; did you mean 'shaw'?"),
        (["--position=rop"], "rop"),
        (["--position=RoPE", "--position=t5"], "did you mean 'rope'"),
        (["--position=tupe_a", "--position=t5"], "tupe_a is an architecture; give --arch tupe_a, or --position untied"),
        (["--position=rope", "--arch=tupe_b"], "--arch is set by this command"),
        (["--position=rope", "--presets=rope"], "rope: both a preset and a position"),
        (["--presets=shaw", "--glue=data"], "holds no prepared task"),
        (["--presets=shaw", "--glue=glue", "--tasks=RTE"], "holds no data for RTE; prepared: CoLA, SST-2"),
        (["--presets=shaw", "--tasks=RTE"], "--tasks needs --glue"),
        (["--presets=shaw", "--glue=other"], "another vocabulary"),
        (["--presets=shaw", "--glue=nowhere"], "dict.txt"),
        (["--size=giant"], "giant"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(place, monkeypatch, words, message):
    monkeypatch.chdir(place)
    assert message in compare(place, *words, status=2)
    assert not (place / "out").exists()


def test_a_position_replaces_that_of_bert_and_its_name(place):
    """A folder says what is in it."""
    lines = compare(place, "--position=alibi", "--position=untied+t5", "--dry-run").splitlines()
    said = [[word for word in line.split() if word.startswith(("--arch", "--pos", "--cls"))] for line in lines]
    assert said == [[f"--position={name}", "--arch=bert_a_tiny"] for name in ("alibi", "untied+t5")]
    assert f"--output={place}/out/positions/bert_a_tiny/alibi " in lines[0]
    assert not (place / "out").exists()


@pytest.mark.slow
def test_real_runs(learnable, vocabulary, tmp_path):
    """Two encodings, two tasks of GLUE; started again, nothing is run again."""
    compare = [
        sys.executable, "-m", "tupe", "compare", "--data", vocabulary, "--output", "out", "--position=nopos",
        "--position=shaw", "--jobs=2", "--glue", learnable, "--tasks=CoLA,STS-B", "--seeds=1", "--lrs=3e-4",
        "--finetune-options=--num-workers=0 --max-epoch=1", "--tokens-per-sample=20", "--batch-size=8",
        "--update-freq=1", "--max-update=2", "--num-workers=0", "--encoder-embed-dim=32",
        "criterion._name=masked_lm_chunked",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(STAND_IN.parents[1])}
    for words in (compare, compare):
        done = subprocess.run(words, env=environment, cwd=tmp_path, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 jobs, 2 finished" in done.stdout and "4 jobs, 4 finished" in done.stdout
    text = (tmp_path / "out" / "report" / "report.md").read_text()
    for word in ("position nopos", "position shaw", "CoLA matthews", "STS-B pearson"):
        assert word in text
