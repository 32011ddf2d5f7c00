"""The command rehearses on a CPU; figures of a card are in no test."""

import itertools
import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lab.bench import gpu

HERE = gpu.Trial(Path("nowhere"), "cpu")


def rehearse(folder, *words):
    result = CliRunner().invoke(gpu.command, [f"--output={folder}", "--device=cpu", *words])
    return result, (folder / "gpu.md").read_text() if (folder / "gpu.md").exists() else ""


@pytest.fixture
def forked(monkeypatch):
    """Parts run in a copy of this process: all imports are there."""
    monkeypatch.setattr(gpu, "CONTEXT", multiprocessing.get_context("fork"))


@pytest.mark.thorough
def test_a_rehearsal_measures_every_part(tmp_path, forked, monkeypatch):
    original = torch.nn.Module.compile  # without a compiler of C++
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: original(self, **{**more, "backend": "eager"}))
    result, page = rehearse(tmp_path)
    assert result.exit_code == 0 and f"{len(gpu.PARTS)} of {len(gpu.PARTS)} parts" in result.output, result.output
    assert "A rehearsal on a CPU" in page and page.count("Measured 2") == len(gpu.PARTS)
    saved = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in gpu.PARTS}
    rows = {name: content["rows"] for name, content in saved.items()}
    modes = itertools.product(("tupe_r-sdpa", "nopos"), ("bf16 autocast", "fp16 weights", "bf16 weights"))
    assert {(row["contender"], row["mode"]) for row in rows["eager"]} == set(modes)
    assert {row["contender"] for row in rows["compiled"]} == {"tupe_r-compile", "nopos-compile"}
    for row in rows["eager"] + rows["compiled"]:
        assert row["tokens_per_s"] > 0 and (row["x_nopos"] == 1) == row["contender"].startswith("nopos")
    assert {row["contender"] for row in rows["operations"]} == {"PyTorch", "here", "sdpa"}


def test_what_fails_is_a_row_and_a_fault_of_cuda_ends_the_part(monkeypatch):
    def fail(*args):
        raise RuntimeError(message)

    monkeypatch.setattr(gpu.step, "measure", fail)
    message = "no such kernel"
    (row,) = gpu.measured(HERE, ["tupe_r-triton", "nopos"], HERE.setting())
    assert row["contender"] == "tupe_r-triton beside nopos" and row["failed"] == "RuntimeError: no such kernel"
    message = "CUDA error: an illegal address"
    with pytest.raises(RuntimeError, match="illegal address"):
        list(gpu.measured(HERE, ["nopos"], HERE.setting()))


def test_all_parts_have_time():
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 14 * 60


def fill(monkeypatch, **parts):
    """In place of all parts: name -> (seconds, function)."""
    added = {name: gpu.Part(name, seconds, ["x"], measure) for name, (seconds, measure) in parts.items()}
    monkeypatch.setattr(gpu, "PARTS", added)


def test_a_cut_at_any_moment_leaves_what_was_measured(tmp_path, forked, monkeypatch):
    """A part that fails, or takes too long, keeps its rows; those after it are measured; a next start measures the
    rest, and what does not fit into the time is named."""
    patience = [0]

    def whole(trial):
        """Whole."""
        yield {"x": float("nan")}

    def fails(trial):
        """Fails."""
        yield {"x": 1}
        if not patience[0]:
            raise ValueError("no luck")

    def hangs(trial):
        """Hangs."""
        yield {"x": 2.0}
        time.sleep(0 if patience[0] else 60)

    fill(monkeypatch, first=(20, whole), second=(20, fails), third=(1, hangs), fourth=(90, whole), fifth=(20, whole))
    result, page = rehearse(tmp_path, "--minutes=1")
    assert result.exit_code == 1 and "2 of 5 parts" in result.output
    assert "second (ValueError: no luck); third (longer than 1 s); fourth (it takes up to 90 s, " in result.output
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in gpu.PARTS if name != "fourth"}
    assert rows == {"first": [{"x": "nan"}], "second": [{"x": 1}], "third": [{"x": 2.0}], "fifth": [{"x": "nan"}]}
    assert "Not complete: ValueError: no luck." in page and "Not complete: longer than 1 s." in page
    patience[0] = 1
    result, page = rehearse(tmp_path)
    assert result.exit_code == 0 and "first ..." not in result.output and "second ..." in result.output
    assert "Not complete" not in page
    (tmp_path / "gpu.md").unlink()
    assert rehearse(tmp_path, "--minutes=0")[1] == page  # of committed rows


def test_a_card_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.command, [f"--output={tmp_path}/new"])
    assert result.exit_code == 2 and "--device cuda: this PyTorch sees no GPU; valid here: cpu" in result.output
    assert not (tmp_path / "new").exists()
