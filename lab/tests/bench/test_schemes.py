"""The cost table: counts against formulas, and the command from end to end. No claims about time."""

import json
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from lab.bench import contenders
from lab.bench import schemes as cost
from tupe import windows
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
    assert cases["absolute"] == ("absolute", "tied")
    assert cases["untied, [CLS] untied"] == ("untied", "untied")
    assert cases["untied+t5, [CLS] untied"] == ("untied+t5", "untied")
    assert list(cost.cases(["tupe_a", "t5+urpe"]).values()) == [
        ("nopos", "tied"), ("untied", "untied"), ("t5+urpe", "tied"),
    ]  # fmt: skip


def test_a_step_trains_the_model_and_the_encoding_whose_turn_it_is():
    stage = cost.Stage(cost.cases(["nopos", "t5", "untied"]), TINY)
    word = stage.contender.model.encoder.tokens.weight
    t5, untied = stage.parts["t5"][0], stage.parts["untied"][0]
    before = [x.detach().clone() for x in (word, t5.t5.table.weight, untied.untied.table.weight)]
    assert min(stage.step("t5", 0)) > 0 and stage.contender.model.encoder.positions is t5
    after = [word, t5.t5.table.weight, untied.untied.table.weight]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, False, True]
    assert all(p.grad is None for p in stage.contender.model.parameters())


def test_a_row_has_what_an_encoding_costs_beside_none():
    nopos, t5, again = cost.measure(cost.cases(["t5"]), TINY, 2)
    assert [row["contender"] for row in (nopos, t5, again)] == ["nopos", "t5", cost.CONTROL]
    assert nopos["parameters"] == again["parameters"] == nopos["products_k"] == again["element_wise_k"] == 0
    assert t5["parameters"] == cost.parameters("t5", "tied", TINY) > 0 and t5["element_wise_k"] > 0
    assert all(len(row["steps"]) == 2 for row in (nopos, t5, again))


def test_command(tmp_path):
    out = tmp_path / "folder" / "cost"
    words = ["--size=tiny", "--tokens=32", "--lengths=16,8", "--turns=2", "--vocab-size=100", f"--output={out}"]
    result = CliRunner().invoke(cost.command, [*words, "--positions=bert_a,tupe_r,shaw"])
    assert result.exit_code == 0 and result.stdout == out.with_suffix(".md").read_text() + "\n"
    assert "L = 16, float32 turn 2/2: nopos" in result.stderr
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    names = ["nopos", "absolute", "untied+t5, [CLS] untied", "shaw", cost.CONTROL]
    assert [row["contender"] for row in rows] == 2 * names
    assert "| tiny, N = 2, B = 2, L = 16, float32 | nopos | 0 | 0.0 | 0.0 | " in result.stdout
    assert rows[1]["parameters"] == 16 * 128 and "| shaw | 8,256 | " in result.stdout
    assert len(out.with_suffix(".png").read_bytes()) > 1000
    result = CliRunner().invoke(cost.command, ["--lengths=0", *words[:2], *words[3:]])
    assert result.exit_code == 2 and "0 is not in the range x>=1" in result.output
    result = CliRunner().invoke(cost.command, [*words, "--positions=tupe_x"])
    assert result.exit_code == 2 and "tupe_x" in result.output
