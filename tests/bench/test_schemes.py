"""The cost table: counts against formulas, and the command from end to end. No claims about time."""

import json
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from tupe import windows
from tupe.bench import contenders
from tupe.bench import schemes as cost
from tupe.positions import PositionScheme
from tupe.schemes import SCHEMES

C, H, D, L, B, N = 128, 2, 64, 16, 2, 2
TINY = contenders.Setting("tiny", length=L, batch=B, vocab=100)


def test_parameters_are_the_papers():
    base = contenders.Setting("base", length=512)
    extra = cost.parameters("untied", "untied", base) - cost.parameters("absolute", "tied", base)
    weights = extra - 2 * 768 - 2 * 768 - 768  # without the biases of U_Q and U_K, the layer norm, the row of theta
    assert weights == 2 * 768**2 and round(weights / 1e6, 2) == 1.18
    assert cost.parameters("alibi", "tied", base) == cost.parameters("nopos", "tied", base) == 0
    assert cost.parameters("alibi", "untied", base) == 2 * 12  # theta


@pytest.mark.parametrize(
    ("position", "products", "element_wise"),
    [
        # added once, its gradient summed over the batch, and the rows copied, once for the batch
        ("absolute", 0, 2 * C + C / B),
        # four for each offset's bucket; table reordered; bias added in each layer, its gradient summed over the batch;
        # those of the layers added up
        ("t5", 0, 2 * N * H * L + (N - 1) * H * L / B + (H + 4) * (2 * L - 1) / (B * L)),
        # U_Q, U_K on L rows, then p . p: forward and two products backward, once for the whole batch
        ("untied", 3 * (2 * 2 * C**2 + 2 * L * C) / B, None),
        # in each layer a product with 2L - 1 vectors; fixed vectors get no gradient
        ("shaw", 3 * N * H * 2 * D * (2 * L - 1), None),
        ("shaw_sinusoidal", 2 * N * H * 2 * D * (2 * L - 1), None),
        # both of each layer's products are with 2L - 1 rows, which two projections of the layer make
        # both products of each layer with the 8 keys that a chunk of 4 queries sees, instead of with 16
        ("window:size:4:every:0", N * 3 * 2 * 2 * C * (8 - L), None),
        ("deberta", N * 3 * (2 * 2 * C * C * (2 * L - 1) / (B * L) + 2 * H * 2 * D * (2 * L - 1)), None),
    ],
)
def test_operations_by_hand(position, products, element_wise, monkeypatch):
    monkeypatch.setattr(windows, "CHUNK", 4)
    base, counted = cost.flops("nopos", "tied", TINY), cost.flops(position, "tied", TINY)
    assert counted[0] - base[0] == pytest.approx(products, rel=1e-12)
    assert element_wise is None or counted[1] - base[1] == element_wise
    lm_head = 6 * contenders.MASKED * (C**2 + C * TINY.vocab)
    assert base[0] == pytest.approx(contenders.flops_per_token(TINY) - lm_head)


def test_every_registered_scheme_and_architecture_has_a_row():
    class Newcomer(PositionScheme):
        pass

    with mock.patch.dict(SCHEMES, newcomer=Newcomer):
        cases = cost.cases()
    assert next(iter(cases)) == "nopos" and {position for position, _ in cases.values()} >= {*SCHEMES, "newcomer"}
    assert cases["absolute (BERT-A)"] == ("absolute", "tied")
    assert cases["untied, [CLS] untied (TUPE-A)"] == ("untied", "untied")
    assert cases["untied+t5, [CLS] untied (TUPE-R)"] == ("untied+t5", "untied")
    assert list(cost.cases(["tupe_a", "t5+urpe"]).values()) == [
        ("nopos", "tied"), ("untied", "untied"), ("t5+urpe", "tied"),
    ]  # fmt: skip


def test_a_step_trains_the_model_and_the_encoding_whose_turn_it_is():
    stage = cost.Stage(cost.cases(["nopos", "t5", "untied"]), TINY)
    word = stage.contender.model.encoder.tokens.weight
    t5, untied = stage.parts["t5"][0], stage.parts["untied (TUPE-A tie-cls)"][0]
    before = [x.detach().clone() for x in (word, t5.t5.table.weight, untied.untied.table.weight)]
    assert min(stage.step("t5", "float32", 0)) > 0 and stage.contender.model.encoder.positions is t5
    after = [word, t5.t5.table.weight, untied.untied.table.weight]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, False, True]
    assert all(p.grad is None for p in stage.contender.model.parameters())


def test_ratios_are_taken_within_rounds():
    assert cost.shown([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == ("2.000 (1.00 to 3.00)", "2.000")
    rows = [{"encoding": "absolute (BERT-A)", "seconds": [1.0]}, {"encoding": "x (TUPE-A)", "seconds": [1.25]}]
    assert cost.against_bert(rows) == ["TUPE-A / BERT-A: median 1.250 (1.25 to 1.25), fastest 1.250"]
    assert cost.against_bert(rows[1:]) == []


def test_precisions_take_turns_in_one_model(monkeypatch):
    seen = []

    class Stage(cost.Stage):
        def step(self, name, precision, turn):
            seen.append((name, precision, id(self.contender.model)))
            return super().step(name, precision, turn)

    monkeypatch.setattr(cost, "Stage", Stage)
    rows = cost.rows(cost.cases(["t5"]), TINY, 2, ["float32", "bf16"], lambda line: None)
    names = [row["encoding"] for row in rows]
    assert names == ["nopos", "t5", cost.CONTROL, "nopos, bf16", "t5, bf16", f"{cost.CONTROL}, bf16"]
    assert rows[1]["parameters"] == rows[4]["parameters"] > 0 and rows[3]["parameters"] == 0
    assert {(name, kind) for name, kind, _ in seen} == {
        (name, kind) for name in ("nopos", "t5", cost.CONTROL) for kind in ("float32", "bf16")
    }
    assert len(seen) == 3 * 6 and len({model for *_, model in seen}) == 1


def test_command(tmp_path):
    def run(*words):
        result = CliRunner().invoke(cost.command, words)
        return result.exit_code, result.output

    out = tmp_path / "folder" / "cost"
    options = ["--size=tiny", "--tokens=32", "--rounds=2", "--vocab-size=100", f"--output={out}"]
    options += ["--positions=bert_a,tupe_r,shaw"]
    status, printed = run(*options, "--lengths=16")
    assert status == 0 and printed.endswith(out.with_suffix(".md").read_text() + "\n")
    assert "TUPE-R / BERT-A" in printed and "L=16 turn 2/2: nopos" in printed and "minutes left" in printed
    rows = json.loads(out.with_suffix(".json").read_text())["lengths"]["16"]["rows"]
    names = [row["encoding"] for row in rows]
    assert names == ["nopos", "absolute (BERT-A)", "untied+t5, [CLS] untied (TUPE-R)", "shaw", cost.CONTROL]
    assert "| nopos | 0 | 0.0 | 0.0 | 1.000 (1.00 to 1.00) | 1.000 |" in printed
    assert rows[0]["parameters"] == rows[4]["parameters"] == 0
    assert rows[1]["parameters"] == 16 * 128 and all(len(row["seconds"]) == 2 for row in rows)
    with mock.patch.object(cost, "rows", side_effect=AssertionError):  # finished lengths are read
        assert "| shaw | 8,256 |" in run(*options, "--lengths=16")[1]
    image = out.with_suffix(".png").read_bytes()
    with mock.patch.object(cost, "rows", side_effect=AssertionError):
        assert "| shaw | 8,256 |" in run(f"--draw={out.with_suffix('.json')}")[1]
    assert out.with_suffix(".png").read_bytes() == image and len(image) > 1000
    for words in ([*options[:-1], "--positions=bert_a,tupe_r,t5"], [*options, "--rounds=3"]):
        status, printed = run(*words, "--lengths=16")
        assert status == 2 and "holds other measurements" in printed and "choose another --output" in printed
    threads = torch.get_num_threads()
    try:
        status, printed = run(*options, "--lengths=16", f"--threads={threads + 1}")
    finally:
        torch.set_num_threads(threads)
    assert status == 2 and f"holds measurements with threads {threads}; choose another --output" in printed
    status, printed = run(*options, "--lengths=0")
    assert status == 2 and "0 is too small; valid: 1 or more" in printed
    status, printed = run("--positions=tupe_x", "--size=tiny", "--vocab-size=100", f"--output={tmp_path}/none")
    assert status == 2 and "tupe_x" in printed
