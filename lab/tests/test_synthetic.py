"""What each position encoding can tell apart: structure in float64, training where it takes seconds, and the tasks."""

import itertools
import re

import pytest
import torch
from click.testing import CliRunner

from lab.known import FIRST
from lab.synthetic import (
    DEFAULTS,
    KEYS,
    WORDS,
    accuracies,
    agrees,
    command,
    deviations,
    even,
    identify,
    options_of,
    read_runs,
    structure,
    sweep,
    train,
    verdict,
)
from tupe.attention import NORMALISERS
from tupe.positions import Dims, Positions, overrides
from tupe.schemes import SCHEMES

ONLY_LOGITS = [
    "untied", "absolute_d", "nonparametric", "factored", "clipped", "t5", "alibi", "rope", "deberta", "shaw",
]  # fmt: skip


def mirrored(position):
    """Whether all that a scheme gives is logits that are the same from i to j as from j to i, for equal tokens."""
    if position == "grape_a":
        return True
    positions = Positions(position, Dims(max_positions=16, width=8, heads=2, layers=1, head_dim=4, value_dim=4))
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    if any(overrides(scheme, "content", "rotate") for scheme in positions.values()):
        return False
    bias, _ = positions.terms(16)[0]
    return torch.equal(bias, bias.transpose(1, 2))


def predicted(position, normaliser, special):
    """The verdict on `equal` from which hooks the schemes fill in; None where that is not enough (symmetric schemes).

    A row of softmax weights sums to 1, so equal values give equal outputs whatever the logits are; position has to
    enter some other way, or there have to be values that differ: [CLS] and [SEP].
    """
    schemes = [SCHEMES[name] for name in position.split("+") if not SCHEMES[name].only_scales]
    if any(overrides(scheme, "embed", "gate", "value", "unrotate") for scheme in schemes):
        return "pass"
    if not any(overrides(scheme, "bias", "content", "rotate") for scheme in schemes):
        return "fail"
    if special:
        return "pass"
    return "fail" if normaliser == "softmax" else None


# Softmax and a normaliser that is none of a row's sum, for every scheme; the other ones for some of each verdict.
SOME = ["nopos", "absolute", "alibi", "rope", "urpe", "untied+t5"]
NORMALISED = [(name, kind) for name in [*SCHEMES, "shaw+shaw_values", "untied+t5"] for kind in NORMALISERS
              if kind in ("softmax", "l2") or name in SOME]  # fmt: skip


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("position, normaliser", NORMALISED)
def test_structure_is_what_the_hooks_predict(position, normaliser, special):
    spread, asymmetry, distinct = structure(position, n=16, special=special, normaliser=normaliser)
    expected = predicted(position, normaliser, special)
    if expected is None:
        expected = "8 of 16" if mirrored(position) else "pass"
    assert verdict(distinct, 16) == expected
    assert (asymmetry < 1e-12) == (expected != "pass")
    if expected != "fail":
        assert spread > 1e-7  # no grey zone between 1e-12 and what positions really do


@pytest.mark.parametrize(("special", "distinct"), [(True, 2 * 3 + 1), (False, 3 + 1)])
def test_words_in_the_middle_of_windows_are_all_alike(special, distinct):
    """Windows of 6 in the second of two layers: 3 words at each end see it; without special tokens, both ends alike."""
    assert structure("window:size:6", n=16, special=special, normaliser="l2").distinct == distinct


@pytest.mark.parametrize("position", ONLY_LOGITS)
def test_softmax_hides_position_terms_in_the_logits(position):
    assert predicted(position, "softmax", special=False) == "fail"
    assert predicted(position, "softmax", special=True) == "pass"


@pytest.mark.parametrize("position", ["absolute", "urpe", "t5+urpe", "shaw_values", "rope_values"])
def test_other_ways_than_logits_get_through_softmax(position):
    assert predicted(position, "softmax", special=False) == "pass"


def test_gated_attention_units_obey_the_same_rule():
    for normaliser, expected in [("softmax", "fail"), ("l2", "pass"), ("relu2", "pass")]:
        assert verdict(structure("rope", n=16, layer="gau", normaliser=normaliser).distinct, 16) == expected


@pytest.mark.parametrize(
    ("position", "normaliser", "special", "low", "high"),
    [
        ("absolute", "softmax", False, 0.99, 1),
        pytest.param("rope", "softmax", False, 0, 0.2, marks=pytest.mark.slow),  # success ends early, failure does not
        ("rope", "softmax", True, 0.99, 1),
        ("rope", "l2", False, 0.99, 1),
        ("rope_values", "softmax", False, 0.99, 1),
        pytest.param("nopos", "softmax", True, 0, 0.2, marks=pytest.mark.slow),
    ],
)
def test_training_agrees(position, normaliser, special, low, high):
    accuracy, _ = train("equal", position, n=32, steps=400, lr=3e-3, normaliser=normaliser, special=special)
    assert low <= accuracy <= high


def test_tasks_of_urpe():
    generator = torch.Generator().manual_seed(0)
    tokens, targets = identify(6, 4, 3, generator)
    assert tokens.shape == targets.shape == (3, 6) and targets.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert tokens.min() >= WORDS and tokens.max() < WORDS + 4
    for n in (6, 7):
        tokens, targets = even(n, 4, 3, generator)
        assert (targets[:, :3] == tokens[:, 1:6:2] - WORDS).all()  # w_2, w_4, w_6, counted from 1
        assert (targets[:, 3:] == 4).all()


@pytest.mark.thorough
def test_even_tokens_can_be_learned_with_positions_only():
    options = {"n": 8, "words": 4, "steps": 250, "lr": 3e-3, "layers": 1}
    assert train("even", "absolute", **options)[0] > 0.99
    assert train("even", "nopos", **options)[0] < 0.8


def cells(task, positions, normalisers, specials, seeds):
    return list(itertools.product([task], ["transformer"], positions, normalisers, specials, seeds))


def test_finished_runs_are_not_repeated(tmp_path):
    path = tmp_path / "runs.jsonl"
    positions = ["absolute", "nopos"]
    wanted = {"task": "equal", "positions": positions, "normalisers": ["softmax"], "specials": [False], "seeds": [1]}
    options = {"n": 8, "steps": 40, "lr": 3e-3}
    assert len(list(sweep(path, cells(**wanted), **options))) == 2
    assert list(sweep(path, cells(**wanted), **options)) == []
    runs = list(sweep(path, cells(**{**wanted, "seeds": [1, 2]}), **options))
    assert [(run["position"], run["seed"]) for run in runs] == [("absolute", 2), ("nopos", 2)]
    assert len(path.read_text().splitlines()) == 4


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes").write_text("notes")
    with pytest.raises(ValueError, match="notes holds something other than runs"):
        next(sweep(tmp_path / "notes", cells("even", ["nopos"], ["softmax"], [False], [1]), n=8, steps=1))
    assert (tmp_path / "notes").read_text() == "notes"


def test_runs_with_other_options_are_runs_of_their_own(tmp_path):
    path = tmp_path / "runs.jsonl"
    wanted = {"task": "even", "positions": ["nopos"], "normalisers": ["softmax"], "specials": [False], "seeds": [1]}
    options = {"n": 8, "words": 4, "layers": 1, "steps": 2, "lr": 1e-3}
    for changed in ({}, {"n": 6}, {"lr": 2e-3}):
        (run,) = sweep(path, cells(**wanted), **{**options, **changed})
        assert run["options"] == options_of(run) == {**options, **changed}
        assert list(sweep(path, cells(**wanted), **{**options, **changed})) == []


def test_the_published_runs_count_as_runs_with_the_defaults():
    path = FIRST.parent / "probe_equal.jsonl"
    runs = read_runs(path)
    assert len(runs) == 870 and all(options_of(run) == DEFAULTS for run in runs)
    wanted = {"positions": ["alibi"], "normalisers": list(NORMALISERS), "specials": [False, True], "seeds": [1, 2, 3]}
    assert next(sweep(path, cells("equal", **wanted)), None) is None


def test_effort_follows_the_structure(tmp_path):
    path = tmp_path / "runs.jsonl"
    wanted = {"task": "equal", "positions": ["t5", "nopos"], "normalisers": ["l2"], "specials": [False], "seeds": [1]}
    t5, nopos = sweep(path, cells(**wanted), n=8, steps=30, lr=1e-6)
    assert t5["steps"] == 30 + 60 and nopos["steps"] == 10
    t5, nopos = sweep(path, cells(**wanted), n=8, steps=1, lr=1e-6)
    assert t5["steps"] == 1 + 2 and nopos["steps"] == 1


@pytest.mark.parametrize("n", [2, 64])
def test_chance_is_no_deviation(n):
    cell = {"position": "nopos", "normaliser": "softmax", "special": False, "layer": "transformer"}
    assert deviations([{**cell, "accuracy": 1 / n}], n=n) == []
    assert len(deviations([{**cell, "accuracy": 0.9}], n=n)) == 1


def test_deviations_from_the_structure():
    def run(position, special, accuracy):
        cell = {"position": position, "normaliser": "l2", "special": special, "layer": "transformer"}
        return {**cell, "accuracy": accuracy}

    fine = [run("t5", False, 0.99), run("nopos", True, 0.19), run("alibi", False, 0.5), run("alibi", True, 1.0)]
    fine.append(run("alibi", False, 0.25))
    wrong = [run("t5", False, 0.98), run("nopos", True, 0.2), run("alibi", False, 0.7), run("alibi", False, 0.2)]
    deviating = deviations([*fine, *wrong], n=8)
    assert deviating == list(zip(wrong, ["pass", "fail", "4 of 8", "4 of 8"], strict=True))


def test_table():
    def run(position, seed, accuracy):
        return {"position": position, "normaliser": "softmax", "special": False, "seed": seed, "accuracy": accuracy}

    runs = [run("a", 1, 1.0), run("a", 2, 0.995), run("b", 1, 0.5), run("b", 2, 0.25), run("c", 1, 0.5)]
    rows = [cells for _, cells in accuracies(runs).rows]
    assert rows == [["a", "**1.00**"], ["b", "0.25-0.50"], ["c", "0.50 (1)"]]


def probe(*arguments):
    return CliRunner().invoke(command, [*arguments, "--positions=alibi,absolute", "--normalisers=l2", "--length=8"])


def test_command_without_training():
    lines = probe("--structure").output.splitlines()
    assert lines[2:4] == ["| alibi | 4 of 8 | pass |", "| absolute | pass | pass |"]
    assert [line.split(":")[0] for line in lines[4:]] == ["4 of 8", "pass"]


def test_command_keeps_its_runs(tmp_path):
    options = [f"--output={tmp_path / 'new' / 'runs.jsonl'}", "--special=without", "--steps=60"]
    for rate, seeds, shown, stored in [
        ("3e-3", "1", 2, 2),
        ("3e-3", "1", 2, 2),  # from the file
        ("3e-3", "1,2", 4, 4),
        ("2e-3", "1", 2, 6),  # another rate: new runs, and only they are shown
        ("3e-3", "2", 2, 6),
    ]:
        result = probe(*options, f"--lr={rate}", f"--seeds={seeds}")
        assert result.exit_code == 0, result.output
        assert f"of {shown} runs end as" in result.output and "| absolute | **1.00** |" in result.output
        assert len((tmp_path / "new" / "runs.jsonl").read_text().splitlines()) == stored


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "--output"), (["--output=x", "--positions=alibi,alibo"], "alibo")]
)
def test_command_refuses_before_it_trains(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2 and message in result.output
    assert not list(tmp_path.iterdir())


ROW = re.compile(r"\| (`.*`.*) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|")
GROUPS = [row.groups() for row in ROW.finditer((FIRST.parent / "other-results.md").read_text(encoding="utf-8"))]


def distinct(row, position, normaliser, special):
    """How many positions the page's row says that an encoding tells apart."""
    exception = re.search(rf"under {normaliser} (\d+), not", row[0])
    if exception and not special:
        return int(exception[1])
    return int(row[1 + special if normaliser == "softmax" else 3 + special])


def test_all_but_sixteen_runs_end_as_the_page_says():
    runs = [run for run in read_runs(FIRST.parent / "probe_equal.jsonl") if run["layer"] == "transformer"]
    rows = {name: row for row in GROUPS for name in re.findall("`(.*?)`", row[0])}
    assert {run["position"] for run in runs} == {*rows} and len(runs) == 870
    right = [
        agrees(run["accuracy"], distinct(rows[run["position"]], **{key: run[key] for key in KEYS[2:5]}), 64)
        for run in runs
    ]
    assert right.count(False) == 16


@pytest.mark.parametrize("row", GROUPS, ids=lambda row: row[0][:12])
def test_the_pages_numbers_are_those_of_the_structure(row):
    """... of the last encoding in each row."""
    position = re.findall("`(.*?)`", row[0])[-1]
    for normaliser in ("softmax", "l2", "relu2"):
        for special in (False, True):
            found = structure(position, normaliser=normaliser, special=special).distinct
            assert found == distinct(row, position, normaliser, special)
