"""The benchmark compares like with like and computes what it prints; no test depends on how fast this machine is."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from lab.bench import instrument
from lab.bench import step as bench
from lab.bench.contenders import OURS, Contender, Setting, flops_per_token

TINY = Setting("tiny", layers=2, length=20, batch=2, vocab=60)  # 6 of 40 tokens are masked


def rows(names, setting, monkeypatch, peak=0.25):
    """Of made-up times: contender i takes 1 + i seconds a step, and so on; turns vary by a common factor."""

    def take_turns(steps, turns, setting):
        times = {"peak": np.array([[2 * peak], [peak]])}
        for index, name in enumerate(names):
            times[name] = np.array([[0.2 * f, 0.3 * f, 0.5 * f] for f in (1.0 + index, 3.0 + 3 * index)])
        return times

    monkeypatch.setattr(instrument, "take_turns", take_turns)
    monkeypatch.setattr(bench, "Contender", lambda name, setting: SimpleNamespace(step=lambda turn: None, kept=list))
    return bench.measure(names, setting, 2)


def test_a_contender_that_runs_out_of_memory_is_left_out(monkeypatch, capsys):
    def out_of_memory(turn):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    def take_turns(steps, turns, setting):
        return {name: np.ones((turns, 3)) for name in steps}

    def contender(name, setting):
        return SimpleNamespace(step=out_of_memory if name.startswith("hf") else lambda turn: None, kept=list)

    monkeypatch.setattr(instrument, "take_turns", take_turns)
    monkeypatch.setattr(bench, "Contender", contender)
    made = bench.measure(["hf", "tupe_r", "nopos"], TINY, 2)
    assert [row["contender"] for row in made] == ["tupe_r", "nopos"]
    assert capsys.readouterr().err == "hf is left out: OutOfMemoryError: CUDA out of memory. Tried to allocate\n"
    with pytest.raises(ValueError, match="no contender fits into memory: tiny, N = 2, B = 2, L = 20, float32"):
        bench.measure(["hf"], TINY, 2)


def test_what_follows_from_times(monkeypatch):
    first, second = rows(["tupe_r", "nopos"], TINY, monkeypatch)
    assert first["tokens_per_s"] == 40 / 2 and second["tokens_per_s"] == 40 / 4  # medians of 1, 3 and 2, 6 seconds
    assert first["forward_s"] == pytest.approx(0.4) and first["memory_mib"] == 0
    assert first["peak_flops"] == 2 * bench.PEAK_SIZE["cpu"] ** 3 / 0.25  # the fastest product
    assert first["share_of_peak"] == pytest.approx(20 * flops_per_token(TINY, "tupe_r") / first["peak_flops"])


def test_what_is_to_be_compiled_is_compiled(monkeypatch):
    """In every turn. Code that is met inside a mode of dispatch, which counts memory, never is."""
    original, calls = torch.nn.Module.compile, []

    def backend(graph, inputs):
        return lambda *args: calls.append(graph) or graph(*args)

    def step(contender, turn):
        before = len(calls)
        contender.forward()
        contender.backward()
        turns.append(len(calls) - before)
        return [1.0, 1.0, 1.0]

    turns = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: original(self, **{**more, "backend": backend}))
    monkeypatch.setitem(bench.PEAK_SIZE, "cpu", 64)
    monkeypatch.setitem(OURS, "tupe_r-compile", ("tupe_r", {"compile": "yes", "attention": "sdpa"}))  # in one graph
    step_of = property(lambda self: partial(step, self), lambda self, value: None)
    monkeypatch.setattr(Contender, "step", step_of, raising=False)
    bench.measure(["tupe_r-compile"], TINY, 1)
    assert turns[0] > 0 and turns == [turns[0], 0, turns[0], turns[0]]  # the second counts memory


def test_memory_is_of_a_step_with_moments():
    contender = Contender("tupe_r", TINY)
    weights = sum(p.nbytes for p in contender.model.parameters())
    assert sum(x.nbytes for x in contender.kept()) < 1.1 * weights
    contender.step(0)
    assert 3 * weights <= sum(x.nbytes for x in contender.kept()) < 3.1 * weights


def test_command(tmp_path, monkeypatch):
    """Two settings from end to end."""
    monkeypatch.setitem(bench.PEAK_SIZE, "cpu", 64)
    words = "--models tupe_r --size tiny --layers 1 --vocab-size 60 --tokens 40 --lengths 20,10 --turns 2 --device cpu"
    output = tmp_path / "new" / "b"
    result = CliRunner().invoke(bench.command, [*words.split(), f"--output={output}"])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("warm-up") == 2 and "tiny, N = 1, B = 4, L = 10, float32 turn 2/2: peak" in result.stderr
    saved = json.loads(output.with_suffix(".json").read_text())
    assert [(r["contender"], r["layers"], r["length"]) for r in saved["rows"]] == [("tupe_r", 1, 20), ("tupe_r", 1, 10)]
    assert all(r["tokens_per_s"] > 0 for r in saved["rows"]) and saved["about"]["command"]
    weights = sum(p.numel() for p in Contender("tupe_r", replace(TINY, layers=1)).model.parameters())
    assert saved["rows"][0]["memory_mib"] * 2**20 >= 16 * weights  # of each its value, gradient and two moments
    page = output.with_suffix(".md").read_text()
    assert result.stdout == page + "\n" and "FLOP per token" in page and page.count("L = 10, float32 | tupe_r |") == 1
    result = CliRunner().invoke(bench.command, ["--lengths=4096", f"--output={output}"])
    assert result.exit_code == 2 and "holds no sequence of 4096" in result.output
