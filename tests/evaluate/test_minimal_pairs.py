"""Minimal pairs: reading, ties, uncertainty, and models for which the answer is known."""

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner

from tupe.evaluate import minimal_pairs
from tupe.evaluate.loading import load_model
from tupe.evaluate.minimal_pairs import (
    MINIMUM,
    Paradigm,
    accuracies,
    credit,
    evaluate,
    macro_average,
    read_paradigms,
)
from tupe.run import checksums
from tupe.text import TextEncoder

ROW = {"sentence_good": "The cat sat.", "sentence_bad": "Cat the sat.", "linguistics_term": "order", "UID": "swap"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_reads_files_and_folders(tmp_path):
    folder = tmp_path / "pairs"
    (folder / ".hidden").mkdir(parents=True)
    write_rows(folder / "swap.jsonl", [ROW, {**ROW, "sentence_good": "The dog ran."}])
    write_rows(folder / ".hidden" / "b.jsonl", [ROW])
    (folder / "README.txt").write_text("Pairs of sentences.\n")
    (swap,) = read_paradigms(folder)
    assert (swap.name, swap.phenomenon, swap.pairs[1]) == ("swap", "order", ("The dog ran.", "Cat the sat."))
    assert read_paradigms(folder / "swap.jsonl") == [swap]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"sentence_good": "A."}\n', "line 1"),
        ("a.jsonl", json.dumps(ROW) + "\nno json\n", "line 2"),
        ("a.jsonl", json.dumps({**ROW, "sentence_bad": " "}) + "\n", "line 1"),
        ("a.jsonl", "\n", "no pair"),
        ("a.zip", "PK", "line 1"),
    ],
)
def test_refuses_what_is_not_a_pair(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_paradigms(tmp_path / name)


def test_ties_count_one_half():
    assert credit(np.array([2e-4, -2e-4, 9e-5, -9e-5, 0.0])).tolist() == [1, 0, 0.5, 0.5, 0.5]


def test_a_handful_of_pairs_does_not_weigh_as_much_as_a_thousand():
    """... where only order differs: how many pairs do is not chosen. All pairs of a file are."""
    few, many = MINIMUM - 1, 1000
    results = {
        name: {"word": np.ones(count), "only_order": np.arange(count) < same}
        for name, count, same in (("few", many, few), ("many", many, few + 1), ("small", few, 0))
    }
    counts = [{n: len(v) for n, v in accuracies(results, only_order=only).items()} for only in (False, True)]
    assert counts == [{"few": many, "many": many, "small": few}, {"many": MINIMUM}]


def test_standard_errors_are_those_of_means():
    """... over new pairs of the same paradigms, and over new paradigms with their pairs."""
    rng, shares = np.random.default_rng(0), np.linspace(0.2, 0.9, 40)

    def drawn(shares):
        return {str(i): (rng.random(200) < p).astype(float) for i, p in enumerate(shares)}

    mean, over_pairs, over_paradigms = macro_average(drawn(shares))
    assert mean == pytest.approx(0.55, abs=0.02)
    assert over_pairs == pytest.approx(np.std([macro_average(drawn(shares))[0] for _ in range(1000)]), rel=0.1)
    again = [macro_average(drawn(rng.choice(shares, 40)))[0] for _ in range(1000)]
    assert over_paradigms == pytest.approx(np.std(again), rel=0.1)
    assert macro_average({"one": np.array([1.0, 0.0, 1.0, 1.0])})[2] is None


@pytest.fixture(scope="module")
def pairs():
    verbs = ("sat", "sang", "ran", "fast")
    words = [[a, b, c] for a, b in (("the", "cat"), ("the", "birds"), ("dogs", "and")) for c in verbs][: MINIMUM + 1]
    order = Paradigm("order", "order", [(f"{a} {b} {c}.", f"{b} {a} {c}.") for a, b, c in words])
    case = Paradigm("case", "case", [("The cat sat.", "the cat sat.")])
    other = Paradigm("other", "other", [("The cat sat.", "The cat sang."), ("Dogs ran.", "Dogs ran fast.")])
    return [order, case, other]


def test_without_positions_word_order_is_exactly_one_half(pairs, vocabulary, nopos):
    model, _ = load_model(nopos, vocabulary)
    results = evaluate(model, TextEncoder(vocabulary), pairs)
    for measure in minimal_pairs.MEASURES:
        assert {name: set(v) for name, v in accuracies(results, measure, only_order=True).items()} == {"order": {0.5}}
    assert results["case"]["same_pieces"].tolist() == [True]  # lower-cased: one and the same sentence
    assert not results["other"]["only_order"].any() and (np.abs(results["other"]["word"]) > 1e-4).all()


def test_with_positions_it_is_not(pairs, vocabulary, pretrained):
    model, _ = load_model(pretrained, vocabulary)
    model.tupe.encoder.positions["t5"].table.weight.data *= 50  # two updates have taught it little
    results = evaluate(model, TextEncoder(vocabulary), pairs)
    assert (np.abs(results["order"]["word"]) > 1e-4).mean() > 0.5


def test_command(pairs, vocabulary, pretrained, nopos, tmp_path):
    (tmp_path / "pairs").mkdir()
    for paradigm in pairs:
        rows = [{**ROW, "sentence_good": good, "sentence_bad": bad} for good, bad in paradigm.pairs]
        write_rows(tmp_path / "pairs" / f"{paradigm.name}.jsonl", rows)
    words = [f"a/b={pretrained}", f"none={nopos}", f"--pairs={tmp_path}/pairs", f"--data={vocabulary}"]
    result = CliRunner().invoke(minimal_pairs.command, [*words, f"--output={tmp_path}/out"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "minimal_pairs.json").read_text()
    of_first, of_none = json.loads(text, parse_constant=pytest.fail).values()  # no NaN, which is not JSON
    assert of_first["pairs"] == 14 and of_first["indistinguishable"] == 1
    assert of_first["order"]["word"]["pairs"] == of_none["order"]["word"]["ties"] == 11
    assert of_first["order"]["word"]["error_over_paradigms"] is None  # one paradigm
    (line,) = [line for line in result.output.splitlines() if "none | only order differs | word" in line]
    assert line.split(" | ")[3:6] == ["50.00", "0.00", "–"]
    lines = list(csv.DictReader((tmp_path / "out" / "pairs.csv").open()))
    with_checksum = [path.name for path, _ in checksums.files_of(tmp_path / "out")]
    assert sorted(with_checksum) == ["minimal_pairs.json", "minimal_pairs.md", "pairs.csv"]
    assert len(lines) == 28 and [line["paradigm"] for line in lines if line["model"] == "none"][0] == "case"
