"""Measures of attention against closed forms, and the parts of BERT's logits against the model's own."""

import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import build_masked_lm, pretrain_arguments, train, write_data

from lab.__main__ import main
from lab.properties import (
    direction_balance,
    four_correlations,
    measures,
    monotonicity_violation,
    symmetry_violation,
    translation_violation,
)
from tupe.evaluate.probes import identical_word_attention

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(49)), "<mask>"]
OFFSETS = np.arange(8)[None] - np.arange(8)[:, None]  # j - i
RANDOM = np.random.default_rng(0).random((8, 8))


def test_closed_forms():
    by_offset = RANDOM.ravel()[:15]
    assert translation_violation(by_offset[OFFSETS + 7]) == 0
    assert symmetry_violation(RANDOM + RANDOM.T) == 0
    assert direction_balance(RANDOM + RANDOM.T) == pytest.approx(1, abs=1e-12)
    assert monotonicity_violation(1 / (1 + abs(OFFSETS))) == 0
    assert monotonicity_violation(1.0 * abs(OFFSETS)) == 1
    assert direction_balance(np.where(OFFSETS > 0, 3.0, 1.0)) == pytest.approx(3)


def test_zero_over_zero_is_nan():
    constant = np.full((8, 8), 0.1)
    assert math.isnan(translation_violation(constant)) and math.isnan(monotonicity_violation(np.eye(2)))
    assert math.isnan(direction_balance(np.eye(8))) and math.isnan(symmetry_violation(np.eye(1)))


def naive_monotonicity(a, offsets):
    bad = triples = 0
    for sign in (1, -1):
        for x in range(len(a)):
            for m in range(1, offsets + 1):
                for n in range(m + 1, offsets + 1):
                    if 0 <= x + sign * n < len(a):
                        bad += a[x, x + sign * m] < a[x, x + sign * n]
                        triples += 1
    return bad / triples


@pytest.mark.parametrize("offsets", [None, 3])
def test_monotonicity_is_the_share_of_pairs(offsets):
    assert monotonicity_violation(RANDOM, offsets) == pytest.approx(naive_monotonicity(RANDOM, offsets or 7))


def test_other_measures_by_their_formulas():
    within = sum(((d := RANDOM.diagonal(k)) - d.mean()) @ (d - d.mean()) for k in range(-7, 8)) / RANDOM.size
    assert translation_violation(RANDOM) == pytest.approx(within / RANDOM.var())
    pairs = [abs(RANDOM[i, j] - RANDOM[j, i]) for i in range(8) for j in range(8) if i != j]
    assert symmetry_violation(RANDOM) == pytest.approx(np.mean(pairs))


def test_measures_leave_out_the_special_positions():
    by_offset = np.exp(-np.abs(np.arange(-7, 8)))
    attention = by_offset[OFFSETS + 7].copy()
    attention[0], attention[:, -1] = 5, 7
    values = measures(attention)
    assert values["translation violation"] == values["symmetry violation"] == values["monotonicity violation"] == 0
    assert values["translation violation with [CLS], [SEP]"] > 0.1


def test_identical_words_without_positions_say_nothing():
    model = build_masked_lm("bert_a_tiny", max_positions=12, position="nopos").eval()
    values = measures(identical_word_attention(model, SYMBOLS, words=4))
    assert values["direction balance"] == pytest.approx(1, abs=1e-5)
    assert values["symmetry violation"] < 1e-7


def test_four_correlations():
    """The four sum to the logits of a model without biases; each is what its name says: it vanishes with its factor."""
    torch.manual_seed(0)
    model = build_masked_lm("bert_a_tiny", max_positions=20).double().eval()
    encoder, tokens = model.tupe.encoder, torch.arange(4, 24)
    with torch.no_grad():
        encoder.embed_norm.weight.add_(torch.randn_like(encoder.embed_norm.weight))
        encoder.embed_norm.bias.zero_()
        encoder.layers[0].attention.qkv.bias.zero_()
    parts = four_correlations(model, tokens)
    assert list(parts) == ["word-word", "word-position", "position-word", "position-position", "remainder"]
    assert parts["remainder"].abs().max() < 1e-12 < parts["word-position"].abs().max()
    with torch.no_grad():
        encoder.embed_norm.bias.normal_()
        encoder.layers[0].attention.qkv.bias.normal_()
    with_biases = four_correlations(model, tokens)
    assert all(torch.equal(with_biases[name], parts[name]) for name in parts if name != "remainder")
    assert with_biases["remainder"].abs().max() > 0
    with torch.no_grad():
        encoder.positions.absolute.table.weight.zero_()
    gone = four_correlations(model, tokens)
    assert all(gone[name].abs().max() == 0 for name in gone if "position" in name)
    assert gone["word-word"].abs().max() > 0


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("tupe_a_tiny", {}),
        ("bert_a_d_tiny", {}),
        ("bert_a_tiny", {"position": "absolute+shaw:layer"}),
        ("bert_a_tiny", {"position": "absolute+urpe", "cls": "untied"}),
        ("bert_a_tiny", {"segments": "learned"}),
        ("bert_a_tiny", {"block": "gau", "activation_dropout": 0.0}),
        ("bert_a_tiny", {"position": "nopos"}),
    ],
)
def test_four_correlations_need_logits_of_words_and_positions_only(arch, options):
    with pytest.raises(ValueError, match="for BERT-A only"):
        four_correlations(build_masked_lm(arch, max_positions=16, **options), torch.arange(8))


def test_commands(tmp_path):
    pytest.importorskip("fairseq")
    data = write_data(tmp_path / "data")
    train(pretrain_arguments(data, tmp_path / "run", "--max-update=1", "--num-workers=0", arch="bert_a_tiny"))
    checkpoint = f"{tmp_path}/run/checkpoint_last.pt"
    result = CliRunner().invoke(main, ["properties", f"BERT={checkpoint}", "--words=3"])
    assert result.exit_code == 0, result.output
    assert "| translation violation |" in result.output and "BERT" in result.output
    words = ["correlations", f"--checkpoint={checkpoint}", "--length=20", f"--output={tmp_path}/parts.png"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")
