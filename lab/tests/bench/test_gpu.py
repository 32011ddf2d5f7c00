"""The command rehearses on a CPU; figures of a card are in no test."""

import itertools
import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from lab.bench import gpu

HERE = gpu.Trial(Path("nowhere"), "cpu")


def rehearse(folder, *words):
    result = CliRunner().invoke(gpu.command, [f"--output={folder}", "--device=cpu", *words])
    return result, (folder / "gpu.md").read_text() if (folder / "gpu.md").exists() else ""


@pytest.fixture
def forked(monkeypatch):
    """Sections run in a copy of this process: all imports are there."""
    monkeypatch.setattr(gpu, "CONTEXT", multiprocessing.get_context("fork"))


@pytest.mark.thorough
def test_a_rehearsal_measures_every_part(tmp_path, forked):
    result, page = rehearse(tmp_path)
    assert result.exit_code == 0 and f"{len(gpu.SECTIONS)} of {len(gpu.SECTIONS)} sections" in result.output, (
        result.output
    )
    assert "A rehearsal on a CPU" in page and page.count("Measured 2") == len(gpu.SECTIONS)
    saved = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in gpu.SECTIONS}
    rows = {name: content["rows"] for name, content in saved.items()}
    assert [row for of_section in rows.values() for row in of_section if "failed" in row] == []
    modes = itertools.product(gpu.TINY, ("bf16 autocast", "fp16 weights", "bf16 weights"))
    assert {(row["contender"], row["mode"]) for row in rows["eager"]} == set(modes)
    assert {row["way"] for row in rows["compiled"]} == {"compiled"} and rows["compiled"][0]["breaks"] == 0
    for row in rows["eager"] + rows["compiled"] + rows["graphs"] + rows["large"]:
        assert min(row["tokens_per_s"], row["kernels_s"], *row["host_s"]) > 0 and row["launches"] > 100
    assert max(abs(row["difference"]) for row in rows["losses"]) < 0.02 and len(rows["losses"]) == 5 * 3
    assert [(row["update"], row["difference"]) for row in rows["loop"]] == [(3, 0), (6, 0), (9, 0)]


def test_all_parts_have_time():
    assert sum(section.seconds for section in gpu.SECTIONS.values()) <= 14 * 60


def fill(monkeypatch, **sections):
    """In place of all sections: name -> (seconds, function)."""
    added = {name: gpu.Section(name, seconds, ["x"], measure) for name, (seconds, measure) in sections.items()}
    monkeypatch.setattr(gpu, "SECTIONS", added)


def test_a_cut_at_any_moment_leaves_what_was_measured(tmp_path, forked, monkeypatch):
    """A section that fails, or takes too long, keeps its rows; those after it are measured; a next start measures the
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

    fill(monkeypatch, first=(20, whole), second=(20, fails), third=(3, hangs), fourth=(90, whole), fifth=(20, whole))
    result, page = rehearse(tmp_path, "--minutes=1")
    assert result.exit_code == 1 and "2 of 5 sections" in result.output
    assert "second (ValueError: no luck); third (longer than 3 s); fourth (it takes up to 90 s, " in result.output
    rows = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in gpu.SECTIONS if name != "fourth"
    }
    assert rows == {"first": [{"x": "nan"}], "second": [{"x": 1}], "third": [{"x": 2.0}], "fifth": [{"x": "nan"}]}
    assert "Not complete: ValueError: no luck." in page and "Not complete: longer than 3 s." in page
    patience[0] = 1
    result, page = rehearse(tmp_path)
    assert result.exit_code == 0 and "first ..." not in result.output and "second ..." in result.output
    assert "Not complete" not in page
    (tmp_path / "gpu.md").unlink()
    assert rehearse(tmp_path, "--minutes=0")[1] == page  # of committed rows


def test_a_start_that_is_cut_earlier_replaces_no_rows(tmp_path, monkeypatch):
    def measured(count, whole):
        def first(trial):
            """First."""
            yield from ({"x": n} for n in range(count))
            if not whole:
                raise ValueError("cut")

        fill(monkeypatch, first=(20, first))
        gpu.run(gpu.Trial(tmp_path, "cpu"), "first")
        return len(json.loads((tmp_path / "first.json").read_text())["rows"])

    assert [measured(*case) for case in ((3, False), (1, False), (4, False), (2, True))] == [3, 3, 4, 2]


def test_what_fails_is_a_row_and_a_fault_of_cuda_ends_the_part():
    def fail(message):
        raise RuntimeError(message)

    assert gpu.tried({"x": 1}, lambda: fail("no such kernel")) == {"x": 1, "failed": "RuntimeError: no such kernel"}
    with pytest.raises(RuntimeError, match="illegal address"):
        gpu.tried({}, lambda: fail("CUDA error: an illegal address"))


def test_attention_beside_the_plain_path_is_right():
    rows = list(gpu.equality(HERE))
    assert len(rows) == 12 and [row for row in rows if "failed" in row] == []
    for row in rows:
        most = 1e-3 if row["dropout"] else {"bf16": 3e-2, "fp16": 4e-3}[row["precision"]]
        assert max(row[name] for name in gpu.NAMES if name in row) < most, row


class Fused(torch.autograd.Function):
    """Attention with the backward pass of fused kernels, which draw their dropout anew."""

    @staticmethod
    def forward(ctx, q, k, v, bias, again):
        weights, kept = (q @ k.transpose(2, 3) + bias).softmax(-1), F.dropout(torch.ones(4, 12, 9, 9), 0.1)
        out = (weights * kept) @ v
        ctx.saved = q, k, v, out, weights, F.dropout(kept.ceil().clamp(0, 1), 0.1) if again else kept
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, weights, kept = ctx.saved
        dx = weights * (grad @ v.transpose(2, 3) * kept - (out * grad).sum(-1, keepdim=True))
        return dx @ k, dx.transpose(2, 3) @ q, (weights * kept).transpose(2, 3) @ grad, dx.sum(0), None


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_pass_that_drops_other_weights_is_seen(again):
    inputs = gpu.attention_case("plain", 4, 9, torch.float32, "cpu", 0.0).inputs
    case = gpu.Case(lambda: Fused.apply(*inputs, again), inputs)
    found = gpu.identities(case, case)
    assert min(found["v"], found["bias"]) > 1e-2 if again else max(found.values()) < 1e-4, found


@pytest.mark.parametrize("half", [False, True])
def test_a_recorded_step_trains_as_a_plain_one(half, monkeypatch):
    """Of CUDA graphs only the rules are pretended: what is recorded runs again, gradients stay where they are."""
    setting = HERE.setting(half=half)
    plain, recorded = (gpu.prepared("tupe_r-sdpa", setting, "eager", dropout=0.0, attention_dropout=0.0) for _ in "ab")

    def graphed(function, device):
        function()
        kept = [p.grad for p in recorded.model.parameters()]

        def replay():
            function()
            for p, gradient in zip(recorded.model.parameters(), kept, strict=True):
                gradient.copy_(p.grad)
                p.grad = None  # a graph knows nothing of Python's attributes
            if half:
                recorded.optimizers[0]._needs_sync = False

        return replay

    monkeypatch.setattr(gpu, "graphed", graphed)
    monkeypatch.setattr(gpu, "timed", lambda device, *calls: lambda turn: [call() for call in calls])
    gpu.record(recorded)
    for _ in range(3):
        plain.step(0)
        recorded.step(0)
    for a, b in zip(plain.model.parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.thorough
def test_layers_of_bert_are_compiled_too():
    pytest.importorskip("transformers")
    contender = gpu.prepared("hf", HERE.setting(), "compiled")
    assert all(layer._compiled_call_impl for layer in contender.model.bert.encoder.layer)


def test_the_fastest_is_read_from_the_rows(tmp_path):
    trial = gpu.Trial(tmp_path, "cpu")
    assert gpu.best(trial) == ("tupe_r-sdpa", trial.setting(), "eager")
    row = {"contender": "tupe_r-sdpa", "precision": "bf16", "half_weights": False, "length": 8, "way": "eager"}
    rows = [{**row, "tokens_per_s": 2.0}, {**row, "contender": "nopos", "tokens_per_s": 9.0}, {**row, "failed": "x"},
            {**row, "half_weights": True, "way": "compiled", "tokens_per_s": 3.0},
            {**row, "length": 4, "tokens_per_s": 9.0}]  # fmt: skip
    (tmp_path / "compiled.json").write_text(json.dumps({"device": "cpu", "rows": rows}))
    assert gpu.best(trial) == ("tupe_r-sdpa", trial.setting(half=True), "compiled")


def test_a_card_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.command, [f"--output={tmp_path}/new"])
    assert result.exit_code == 2 and "--device cuda: this PyTorch sees no GPU; valid here: cpu" in result.output
    assert not (tmp_path / "new").exists()
