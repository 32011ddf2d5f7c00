"""Comparisons: every encoding is pre-trained alike; mistakes are refused before anything is trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tupe.run import record
from tupe.sweep import runner
from tupe.sweep.compare import command, losses_table

STAND_IN = Path(__file__).parents[1] / "stand_in.py"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Data for pre-training. Jobs are processes of tests/stand_in.py."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("word 1\n")
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(STAND_IN)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
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


def test_every_encoding_is_pre_trained_alike(place):
    words = ["--presets=shaw,tupe_a", "--position=t5+rope", "--jobs=2", "--max-update", "5", "task.mask_prob=0.2"]
    folders = {
        "shaw": "presets/bert_a_tiny/shaw",
        "tupe_a": "presets/tupe_a_tiny/tupe_a",
        "t5+rope": "positions/bert_a_tiny/t5+rope",
    }
    for _ in range(2):  # the second time, nothing is run again
        assert "| presets/bert_a_tiny/shaw | 5.000 |" in compare(place, *words)
        assert starts(place) == dict.fromkeys(folders.values(), 1)
    for name, folder in folders.items():
        given = words_of(place / "out" / folder)
        assert {"pretrain", "--max-update=5", "task.mask_prob=0.2", f"--data={place / 'data'}"} <= set(given)
        assert f"--arch={Path(folder).parent.name}" in given
        assert f"--{folder.partition('s/')[0]}={name}" in given


def test_mistakes_in_options_of_the_trainings_are_refused_first(place):
    refused = compare(place, "--presets=shaw,alibi", "--arhc=bert_a", status=2)
    assert "no such option --arhc" in refused
    assert "leave it out" in compare(place, "--presets=shaw", "--disable-validation", status=2)
    assert not list(place.glob("out/**/sweep.json"))


def test_losses_are_means_over_seeds(place):
    compare(place, "--position=rope", "--pretraining-seeds=1,2")
    assert starts(place).keys() == {f"positions/bert_a_tiny/rope_seed{seed}" for seed in (1, 2)}
    row = "| positions/bert_a_tiny/rope | 5.000 | 0.00 | – | – | 2 | ? |"
    assert row in (place / "out" / "losses.md").read_text()
    (line,) = (place / "out" / "losses.csv").read_text().splitlines()[1:]
    assert line == "positions/bert_a_tiny/rope,5.000,0.00,,,2,?"


@pytest.mark.parametrize("task, marks", [("masked_lm", ["0", "1", "2"]), ("electra", ["?", "?", "?"])])
def test_runs_that_are_still_on_the_plateau_are_counted(tmp_path, task, marks):
    """They are not half a bit below the mean of those without positions, 9.1. Nats of ELECTRA do not compare."""
    states = {}
    for name, losses in {"nopos": (9.0, 9.2), "t5": (8.9, 8.5), "rope": (6.0, 6.0)}.items():
        for seed, loss in enumerate(losses, 1):
            run = record.Record(task if name == "rope" else "masked_lm", seed=seed, splits=["valid", "books"])
            run.scores = [
                {"split": "valid", "loss": loss},
                {"split": "books", "loss": -loss},
            ]  # the first split decides
            job = runner.Job(f"positions/{name}_seed{seed}", tmp_path / f"{name}{seed}", ())
            job.folder.mkdir()
            run.save(job.folder)
            states[job] = "finished"
    rows = [cells for _, cells in losses_table(states).rows]
    assert [cells[0] for cells in rows] == ["positions/rope", "positions/t5", "positions/nopos"]
    assert rows[1][1:3] == ["8.700", "0.28"] and [cells[6] for cells in rows] == marks


def test_differences_from_the_first_are_paired_by_seed(tmp_path):
    """t5 is 1.0, 1.2 and 1.4 below absolute: 1.2 +- 4.303 * 0.2 / sqrt(3), t of two degrees of freedom. A fourth seed
    of one alone does not count, nor does a failed one; fewer than three give no interval."""
    runs = {
        "absolute": {1: 6.0, 2: 8.0, 3: 7.0, 4: 1.0},
        "t5": {3: 5.6, 1: 5.0, 2: 6.8},
        "rope": {1: 6.5, 2: 8.0},
        "alibi": {5: 9.0},
    }
    states = {runner.Job(f"positions/{name}_seed0", tmp_path / f"{name}0", ()): "failed" for name in runs}
    for name, losses in [*runs.items()][::-1]:  # in whatever order those that finished come
        for seed, loss in losses.items():
            job = runner.Job(f"positions/{name}_seed{seed}", tmp_path / f"{name}{seed}", ())
            job.folder.mkdir()
            scores = [{"split": "valid", "loss": loss}]
            record.Record("masked_lm", seed=seed, splits=["valid"], scores=scores).save(job.folder)
            states[job] = "finished"
    table = losses_table(states)
    assert table.header[3:5] == ["minus absolute", "95 % (seeds)"]
    cells = {row[0]: row[3:6] for _, row in table.rows}
    assert cells["positions/t5"] == ["-1.20", "-1.70 to -0.70 (3)", "3"]
    assert cells["positions/rope"] == ["+0.25", "? (2)", "2"] and cells["positions/absolute"] == ["", "", "4"]
    assert cells["positions/alibi"] == ["", "", "1"]


def test_an_encoding_whose_pre_training_fails_is_left_out(place):
    folder = place / "out/presets/bert_a_tiny/rope"
    folder.mkdir(parents=True)
    (folder / "behave.py").write_text("run.end('diverged'); run.save(folder); sys.exit(1)")
    printed = compare(place, "--presets=rope,alibi", status=1)
    assert "FAILED (diverged)" in printed and "1 of 2 jobs did not finish: presets/bert_a_tiny/rope" in printed
    assert "| presets/bert_a_tiny/alibi |" in printed and "| presets/bert_a_tiny/rope |" not in printed
    (folder / "behave.py").unlink()
    assert "| presets/bert_a_tiny/rope |" in compare(place, "--presets=rope,alibi", "--retry-failed")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to compare: give --position NAME"),
        (["--presets=shaw,sahw"], "unknown preset 'sahw'; did you mean 'shaw'?"),
        (["--position=rop"], "rop"),
        (["--position=RoPE", "--position=t5"], "did you mean 'rope'"),
        (["--position=tupe_a", "--position=t5"], "tupe_a is an architecture; give --arch tupe_a, or --position untied"),
        (["--position=rope", "--arch=tupe_b"], "--arch is set by this command"),
        (["--presets=shaw", "--data=nowhere"], "data folder not found: nowhere"),
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
@pytest.mark.parametrize("engine", ["fairseq", "torch"])
def test_real_runs(engine, vocabulary, tmp_path):
    """Two encodings; started again, nothing is run again."""
    compare = [
        sys.executable, "-m", "tupe", "compare", f"--engine={engine}", "--data", vocabulary, "--output", "out",
        "--position=nopos", "--position=shaw", "--jobs=2", "--tokens-per-sample=20", "--batch-size=8",
        "--update-freq=1", "--max-update=2", "--num-workers=0", "--encoder-embed-dim=32",
        "criterion._name=masked_lm_chunked",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(STAND_IN.parents[1])}
    for words in (compare, compare):
        done = subprocess.run(words, env=environment, cwd=tmp_path, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 jobs, 2 finished" in done.stdout and "| positions/bert_a_tiny/shaw |" in done.stdout
