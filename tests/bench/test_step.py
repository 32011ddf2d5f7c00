"""The benchmark compares like with like and computes what it prints; no test depends on how fast this machine is."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tupe.bench import report as bench_report
from tupe.bench import step as bench
from tupe.bench import turns
from tupe.bench.contenders import DEFAULT, OURS, Contender, Setting, flops_per_token

TINY = Setting("tiny", layers=2, length=20, batch=2, vocab=60)  # 6 of 40 tokens are masked


def test_memory_is_looked_at_first(monkeypatch):
    """What the estimate says for base size: six contenders fit 16 GB, twelve layers of 2048 tokens at L = 2048 not."""
    base = Setting()
    assert 11 * 2**30 < bench.memory_needed(DEFAULT, base) < 14 * 2**30
    assert bench.memory_needed(DEFAULT, replace(base, length=2048, batch=1)) > 16 * 2**30
    monkeypatch.setattr(bench, "memory_available", lambda: 8 * 2**30)
    with pytest.raises(ValueError, match="6 contenders .* 12 GiB .* 8 GiB"):
        bench.measure(DEFAULT, base, 1)


def test_settings_form_a_cross():
    settings = bench.cross(Setting("tiny"), [512, 128], [4, 0], 2048)
    assert [(s.layers, s.length, s.batch) for s in settings] == [(4, 512, 4), (2, 512, 4), (4, 128, 16)]
    with pytest.raises(ValueError, match="2048 tokens holds no sequence of 4096"):
        bench.cross(Setting(), [512, 4096], [0], 2048)


def rows(names, settings, monkeypatch, peak=0.25):
    """Of made-up times: contender i takes 1 + i seconds a step, and so on; turns vary by a common factor."""

    def take_turns(steps, turns, say):
        times = {"peak": np.array([[2 * peak], [peak]])}
        for index, name in enumerate(names):
            times[name] = np.array([[0.2 * f, 0.3 * f, 0.5 * f] for f in (1.0 + index, 3.0 + 3 * index)])
        return times

    monkeypatch.setattr(turns, "take_turns", take_turns)
    monkeypatch.setattr(bench, "Contender", lambda name, setting: SimpleNamespace(step=lambda turn: None, kept=list))
    return [row for setting in settings for row in bench.measure(names, setting, 2)]


def test_a_contender_that_runs_out_of_memory_is_left_out(monkeypatch):
    def out_of_memory(turn):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    def take_turns(steps, turns, say):
        return {name: np.ones((turns, 3)) for name in steps}

    def contender(name, setting):
        return SimpleNamespace(step=out_of_memory if name.startswith("hf") else lambda turn: None, kept=list)

    monkeypatch.setattr(turns, "take_turns", take_turns)
    monkeypatch.setattr(bench, "Contender", contender)
    lines = []
    made = bench.measure(["hf", "tupe_r", "nopos"], TINY, 2, say=lines.append)
    assert [row["contender"] for row in made] == ["tupe_r", "nopos"] and made[0]["times_as_fast"] == {"nopos": 1}
    assert lines == ["hf is left out: out of memory: CUDA out of memory. Tried to allocate"]
    with pytest.raises(ValueError, match="no contender fits into memory at L = 20, N = 2"):
        bench.measure(["hf"], TINY, 2, say=str)


def test_what_follows_from_times(monkeypatch):
    first, second = rows(["tupe_r", "nopos"], [TINY], monkeypatch)
    assert first["tokens_per_s"] == 40 / 2 and second["tokens_per_s"] == 40 / 4  # medians of 1, 3 and 2, 6 seconds
    assert first["times_as_fast"] == {"nopos": 2.0} and second["times_as_fast"] == {"tupe_r": 0.5}
    assert first["forward_s"] == pytest.approx(0.4) and first["memory_mib"] == 0
    assert first["peak_flops"] == 2 * 2048**3 / 0.25  # the fastest product
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
    monkeypatch.setitem(OURS, "tupe_r-compile", ("tupe_r", {"compile": True, "attention": "sdpa"}))  # in one graph
    step_of = property(lambda self: partial(step, self), lambda self, value: None)
    monkeypatch.setattr(Contender, "step", step_of, raising=False)
    bench.measure(["tupe_r-compile"], TINY, 1, say=str)
    assert turns[0] > 0 and turns == [turns[0], 0, turns[0], turns[0]]  # the second counts memory


def test_memory_is_of_a_step_with_moments():
    contender = Contender("tupe_r", TINY)
    weights = sum(p.nbytes for p in contender.model.parameters())
    assert sum(x.nbytes for x in contender.kept()) < 1.1 * weights
    contender.step(0)
    assert 3 * weights <= sum(x.nbytes for x in contender.kept()) < 3.1 * weights


def test_projection():
    assert bench_report.project(1e6 * 256 * 512 / 86400, 1) == pytest.approx(1)
    assert bench_report.project(1e6 * 256 * 512 / 86400, 16) == pytest.approx(1 / 16)


def test_tables_and_picture(tmp_path, monkeypatch):
    settings = bench.cross(TINY, [20, 10, 40], [2, 4], 40)
    settings += [replace(s, precision="bf16") for s in settings]
    made = rows(["tupe_r", "nopos", "fairseq"], settings, monkeypatch)
    text = bench_report.markdown(made, {"date": "today", "gpu": None}, 16)
    assert text.startswith("date today\n\nFLOP per token") and "None" not in text
    assert (
        "|  | tokens/s | x nopos | x fairseq | forward ms | backward ms | optimizer ms | MiB | of peak | days on 16 |"
        in text
    )
    assert "| tupe_r | 20 | 2.00 | 3.00 | 400.0 | 600.0 | 1000.0 | 0 |" in text
    days = bench_report.project(20, 16)
    assert f"| {days:.1f} |" in text
    assert text.count("| tupe_r |") == len(settings) and "bf16 autocast, 4 layers, B = 2, L = 20, cpu, 2 t" in text
    alone = bench_report.markdown(rows(["tupe_r"], [TINY], monkeypatch), {}, 0)
    assert "days" not in alone
    for index, some in enumerate((made, rows(["tupe_r"], [TINY], monkeypatch))):
        bench_report.picture(some).savefig(tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").stat().st_size > 1000


def test_command(tmp_path, monkeypatch):
    """Two settings from end to end."""
    monkeypatch.setitem(bench.PEAK_SIZE, "cpu", 64)
    words = "--models tupe_r --size tiny --vocab-size 60 --tokens 40 --lengths 20 --layers 1,2 --rounds 2"
    output = tmp_path / "new" / "b"
    options = ["--device=cpu", f"--output={output}"]
    result = CliRunner().invoke(bench.command, [*words.split(), *options])
    assert result.exit_code == 0, result.output
    assert result.output.count("warm-up") == 2 and "float32 L=20 N=2 (setting 2/2) turn 2/2: peak" in result.output
    assert "0.0 minutes left" in result.output
    saved = json.loads(output.with_suffix(".json").read_text())
    assert [(r["contender"], r["layers"], r["rounds"]) for r in saved["rows"]] == [("tupe_r", 1, 2), ("tupe_r", 2, 2)]
    assert all(r["tokens_per_s"] > 0 for r in saved["rows"])
    layer = 4 * 128**2 + 2 * 128 * 512 + 4 * 128 + 128 + 512 + 4 * 128  # weights of tiny size
    one, two = (r["memory_mib"] * 2**20 for r in saved["rows"])
    assert two - one >= 16 * layer  # of each its value, gradient and two moments
    assert saved["about"]["command"] and output.with_suffix(".md").read_text() in result.output
    assert output.with_suffix(".png").exists()
    result = CliRunner().invoke(bench.command, ["--lengths=4096"])
    assert result.exit_code == 2 and "holds no sequence of 4096" in result.output


def test_loader(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "loader_speed", lambda folder, workers, length, vocab: 1000 * workers + length)
    result = CliRunner().invoke(bench.command, ["--loader=2", "--lengths=20"])
    assert result.output == "2020 tokens/s from 2 workers\n"
    monkeypatch.undo()
    assert bench.loader_speed(str(tmp_path), 0, length=16, blocks=12, batch=4, vocab=60) > 0
