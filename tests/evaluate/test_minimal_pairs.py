"""Minimal pairs: reading, ties, uncertainty, and models for which the answer is known."""

import json
import math
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tupe.evaluate import minimal_pairs
from tupe.evaluate.loading import load_model
from tupe.evaluate.minimal_pairs import (
    MINIMUM,
    Pair,
    Paradigm,
    accuracies,
    credit,
    evaluate,
    fingerprint,
    macro_average,
    read_paradigms,
)
from tupe.text import TextEncoder

ROW = {"sentence_good": "The cat sat.", "sentence_bad": "Cat the sat.", "linguistics_term": "order", "UID": "swap"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_reads_every_kind(tmp_path):
    folder = tmp_path / "pairs"
    (folder / ".hidden").mkdir(parents=True)
    write_rows(folder / "a.jsonl", [ROW, {**ROW, "sentence_good": "The dog ran."}])
    write_rows(folder / ".hidden" / "b.jsonl", [ROW])
    (tmp_path / "elsewhere").mkdir()
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    (folder / "more" / "c.txt").write_text("Cat the sat.\nThe cat sat.\n\nRan dogs.\nDogs ran.\n")
    with zipfile.ZipFile(tmp_path / "pairs.zip", "w") as archive:
        archive.write(folder / "a.jsonl", "data/a.jsonl")
        archive.write(folder / "a.jsonl", "__MACOSX/data/._a.jsonl")
    c, swap = read_paradigms(folder)
    assert (swap.name, swap.phenomenon, swap.pairs[1]) == ("swap", "order", Pair("The dog ran.", "Cat the sat."))
    assert c == Paradigm("c", "c", [Pair("The cat sat.", "Cat the sat."), Pair("Dogs ran.", "Ran dogs.")])
    assert read_paradigms(tmp_path / "pairs.zip") == [swap]
    (tmp_path / "b.jsonl").write_text(json.dumps({**ROW, "UID": "../up"}) + "\n")
    assert read_paradigms(tmp_path / "b.jsonl")[0].name == "b"  # its scores stay in their folder


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"sentence_good": "A."}\n', "line 1"),
        ("a.jsonl", json.dumps(ROW) + "\nno json\n", "line 2"),
        ("a.jsonl", json.dumps({**ROW, "sentence_bad": " "}) + "\n", "line 1"),
        *(
            ("a.jsonl", f"{json.dumps(ROW)}\n{json.dumps({**ROW, key: text})}\n", rf"a.jsonl, line 2: {key} .* a NUL")
            for key in ROW for text in ("a\0b", "a\ud800", "\udc80b")
        ),
        ("a.jsonl", "\n", "no pair"),
        ("a.txt", "One line.\n", "two lines"),
        ("a.txt", "\n", "no pair"),
        ("a.csv", "x", "no .jsonl"),
    ],
)  # fmt: skip
def test_refuses_what_is_no_pair(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_paradigms(tmp_path)


def test_ties_count_one_half():
    assert credit(np.array([2e-4, -2e-4, 9e-5, -9e-5, 0.0])).tolist() == [1, 0, 0.5, 0.5, 0.5]


def test_a_handful_of_pairs_does_not_weigh_as_much_as_a_thousand():
    """... where only order differs: how many pairs do is not chosen. All pairs of a file are."""
    few, many = MINIMUM - 1, 1000
    results = {
        name: {"word": np.ones(count), "same_words": np.arange(count) < same, "same_pieces": np.zeros(count, bool)}
        for name, count, same in (("few", many, few), ("many", many, few + 1), ("small", few, 0))
    }
    counts = [{n: len(v) for n, v in accuracies(results, only_order=only).items()} for only in (False, True)]
    assert counts == [{"few": many, "many": many, "small": few}, {"many": MINIMUM}]


def test_standard_errors_are_those_of_means():
    """Over pairs: sqrt(p (1 - p) / n) in each paradigm. Over paradigms: what their means vary, and that."""
    rng = np.random.default_rng(0)
    credits = {str(i): (rng.random(1000) < p).astype(float) for i, p in enumerate(np.linspace(0.2, 0.9, 40))}
    mean, over_pairs, over_paradigms = macro_average(credits, resamples=1500)
    means = np.array([values.mean() for values in credits.values()])
    assert mean == means.mean()
    expected = np.sqrt((means * (1 - means) / 1000).sum()) / 40
    assert over_pairs == pytest.approx(expected, rel=0.05)
    assert over_paradigms == pytest.approx(
        np.sqrt(means.var() / 40 + (means * (1 - means)).mean() / 1000 / 40), rel=0.05
    )


def test_one_paradigm_has_no_error_over_paradigms():
    mean, over_pairs, over_paradigms = macro_average({"one": np.array([1.0, 0.0, 1.0, 1.0])})
    assert mean == 0.75 and over_pairs > 0 and math.isnan(over_paradigms)


@pytest.fixture(scope="module")
def pairs():
    verbs = ("sat", "sang", "ran", "fast")
    words = [[a, b, c] for a, b in (("the", "cat"), ("the", "birds"), ("dogs", "and")) for c in verbs][: MINIMUM + 1]
    order = Paradigm("order", "order", [Pair(f"{a} {b} {c}.", f"{b} {a} {c}.") for a, b, c in words])
    case = Paradigm("case", "case", [Pair("The cat sat.", "the cat sat.")])
    other = Paradigm("other", "other", [Pair("The cat sat.", "The cat sang."), Pair("Dogs ran.", "Dogs ran fast.")])
    return [order, case, other]


def test_without_positions_word_order_is_exactly_one_half(pairs, vocabulary, nopos, tmp_path):
    model, _ = load_model(nopos, vocabulary)
    results = evaluate(model, TextEncoder(vocabulary), pairs, tmp_path / "results")
    for measure in minimal_pairs.MEASURES:
        assert {name: set(v) for name, v in accuracies(results, measure, only_order=True).items()} == {"order": {0.5}}
    assert results["case"]["same_pieces"].tolist() == [True]  # lower-cased: one and the same sentence
    assert not results["other"]["same_words"].any() and (np.abs(results["other"]["word"]) > 1e-4).all()


def test_with_positions_it_is_not(pairs, vocabulary, pretrained, tmp_path):
    model, _ = load_model(pretrained, vocabulary)
    model.tupe.encoder.positions["t5"].table.weight.data *= 50  # two updates have taught it little
    results = evaluate(model, TextEncoder(vocabulary), pairs, tmp_path / "results")
    assert (np.abs(results["order"]["word"]) > 1e-4).mean() > 0.5


def call(checkpoints, *words):
    return CliRunner().invoke(minimal_pairs.command, [*map(str, checkpoints), *map(str, words)])


def test_command_keeps_what_it_has(pairs, vocabulary, pretrained, nopos, tmp_path, monkeypatch):
    for paradigm in pairs:
        rows = [{**ROW, "UID": paradigm.name, "sentence_good": p.good, "sentence_bad": p.bad} for p in paradigm.pairs]
        write_rows(tmp_path / f"{paradigm.name}.jsonl", rows)
    words = ["--pairs", tmp_path, "--data", vocabulary, "--output"]
    first = call([f"mine={pretrained}"], *words, tmp_path / "out")
    assert first.exit_code == 0, first.output
    path = tmp_path / "out" / "mine" / "summary.json"
    content = json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN, which is no JSON
    assert content["pairs"] == 14 and content["indistinguishable"] == 1 and content["order"]["word"]["pairs"] == 11
    assert content["order"]["word"]["error_over_paradigms"] is None  # one paradigm
    (line,) = [line for line in first.output.splitlines() if "only order differs | word" in line]
    assert line.split(" | ")[5] == "–"
    other = call([f"mine={nopos}"], *words, tmp_path / "other")
    again = call([f"mine={nopos}"], *words, tmp_path / "out")  # the label of another model before
    notice, _, rest = again.output.partition("\n")
    assert notice.endswith("recomputing") and rest == other.output != first.output
    monkeypatch.setattr(minimal_pairs, "differences", None)  # nothing is computed again
    assert call([f"mine={nopos}"], *words, tmp_path / "out").output == other.output


def test_scores_are_kept_for_what_they_were_computed_from(pairs, vocabulary, pretrained, tmp_path, monkeypatch):
    model, _ = load_model(pretrained, vocabulary)
    encoder, computed, said = TextEncoder(vocabulary), [], []
    real = minimal_pairs.differences
    monkeypatch.setattr(minimal_pairs, "differences", lambda *inputs: computed.append(inputs) or real(*inputs))

    def count(paradigms=pairs, encoder=encoder):
        """How many paradigms are computed, and the lines about it. What is returned is what is computed in a new
        folder."""
        computed.clear()
        said.clear()
        results = evaluate(model, encoder, paradigms, tmp_path / "out", say=said.append)
        numbers = len(computed), len(said)
        fresh = evaluate(model, encoder, paradigms, tmp_path / f"{len(list(tmp_path.iterdir()))}")
        for name, arrays in fresh.items():
            assert results[name].keys() == arrays.keys()
            assert all(np.array_equal(results[name][key], value) for key, value in arrays.items())
        return numbers

    assert count() == (3, 0) and count() == (0, 0)
    (tmp_path / "out" / "case.npz").unlink()  # as if the run had been killed before it
    assert count() == (1, 0)
    (tmp_path / "out" / "case.npz").write_bytes(b"")  # after a power failure
    assert count() == (1, 1)
    changed = [replace(pairs[0], pairs=[Pair(pair.bad, pair.good) for pair in pairs[0].pairs]), *pairs[1:]]
    assert count(changed) == (1, 1) and count() == (1, 1)
    fewer = TextEncoder(vocabulary)
    fewer.words = frozenset({"the", "cat", "sat", "."})
    assert count(encoder=fewer) == (2, 1) and count() == (2, 1)  # "case" has no other words
    with torch.no_grad():
        model.tupe.encoder.embed_norm.bias[0] += 1
    assert count() == (3, 1) and count() == (0, 0)
    for path in (tmp_path / "out").glob("*.npz"):  # without a word about their origin, as before
        with np.load(path) as file:
            arrays = {name: file[name] for name in (*minimal_pairs.MEASURES, "same_words", "same_pieces")}
        np.savez_compressed(path, **arrays)
    assert count() == (3, 1) and count() == (0, 0)


def test_settings_count_too(vocabulary, pretrained):
    model, _ = load_model(pretrained, vocabulary)
    before = fingerprint(model)
    assert before == fingerprint(load_model(pretrained, vocabulary)[0])
    model.tupe.encoder.config.layer_norm_eps = 1e-12  # is not in the state dict
    assert fingerprint(model) != before


def test_labels_of_one_folder_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for name in ("a_x.pt", "a/x.pt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    result = call(["a_x.pt", "a/x.pt"], "--pairs", tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 2 and "a_x.pt and a/x.pt would both be kept as a_x.pt" in result.output
    assert result.output.count("\n") == 1 and not (tmp_path / "out").exists()
