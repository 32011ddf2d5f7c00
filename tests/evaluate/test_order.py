"""What a model knows about word order: against plain computations, and models for which the answer is known."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from helpers import attention_weights, build_masked_lm

from tupe.attention import Plain
from tupe.checkpoints.gate import read_checkpoint
from tupe.cli import main
from tupe.evaluate.loading import load_model
from tupe.evaluate.order import (
    TokenLosses,
    command,
    evaluate,
    held_out_sentences,
    order_sensitivity,
    swap_adjacent,
    token_losses,
)
from tupe.text import TextEncoder


def test_swaps_two_adjacent_words_that_differ():
    words = [[4], [4], [5, 6], [7], [8]]
    swapped = {str(swap_adjacent(words, np.random.default_rng(seed))) for seed in range(50)}
    assert swapped == {str([[4], [5, 6], [4], [7], [8]]), str([[4], [4], [7], [5, 6], [8]])}


def test_sentences_are_held_out_text(pretrained, vocabulary):
    _, text = load_model(pretrained, vocabulary)
    encoder = TextEncoder(vocabulary)
    sentences = held_out_sentences(text, encoder, 20, 126)
    assert sentences == held_out_sentences(text, encoder, 20, 126)
    texts = [encoder.decode([piece for word in words for piece in word]) for words in sentences]
    assert all(text.endswith(" .") and text.count(" ") == 8 for text in texts)  # the eight words of the fixture
    assert sentences[0] == encoder.word_ids(texts[0])
    with pytest.raises(ValueError, match="not 1000"):
        held_out_sentences(text, encoder, 1000, 126)
    longest = max(sum(map(len, words)) for words in sentences)
    assert sentences == held_out_sentences(text, encoder, 20, longest)
    with pytest.raises(ValueError, match=f"and at most {longest - 1} pieces"):
        held_out_sentences(text, encoder, 20, longest - 1)


def test_without_blanks_between_words_pieces_are_swapped(pretrained, vocabulary, tmp_path):
    _, text = load_model(pretrained, vocabulary)
    for name in ("dict.txt", "sentencepiece.bpe.model", "valid.idx", "valid.bin"):
        shutil.copy(vocabulary / name, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"language": "zh"}))
    encoder, sentence = TextEncoder(tmp_path), "The old cat sat on a mat."
    assert encoder.word_ids(sentence) == [[i] for i in encoder.encode(sentence)]
    sentences = held_out_sentences(text, encoder, 5, 126)
    assert all(len(word) == 1 for words in sentences for word in words)
    assert sorted(swap_adjacent(sentences[0], np.random.default_rng(1))) == sorted(sentences[0])
    encoder = TextEncoder(vocabulary)
    encoder.word_marks = [False] * len(encoder)  # as where no piece begins with a blank
    with pytest.raises(
        ValueError, match="0 sentences of 6 to 30 words and at most 126 pieces, not 5; a language without blanks"
    ):
        held_out_sentences(text, encoder, 5, 126)


def test_without_positions_the_order_makes_no_difference(nopos, pretrained, vocabulary):
    for checkpoint, sensitive in ((nopos, False), (pretrained, True)):
        model, text = load_model(checkpoint, vocabulary)
        if sensitive:
            model.tupe.encoder.positions["t5"].table.weight.data *= 50  # two updates have taught it little
        margins = order_sensitivity(model, held_out_sentences(text, TextEncoder(vocabulary), 8, 126))
        assert (np.abs(margins) > 1e-4).any() == sensitive


def test_losses_are_those_of_the_criterion(pretrained, vocabulary):
    model, text = load_model(pretrained, vocabulary)
    losses = token_losses(model, text, 200, batch=3)
    data, total, positions = text.blocks("valid"), [], []
    for i in range(losses.block.max() + 1):
        ids, target = (torch.from_numpy(part) for part in data[0, i])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        for place in target.ne(-100).nonzero().flatten().tolist():
            total.append(float(F.cross_entropy(logits[place], target[place])))
            positions.append(place)
    np.testing.assert_allclose(losses.loss, total, atol=1e-4)
    assert losses.position.tolist() == positions
    with pytest.raises(ValueError, match="fewer than"):
        token_losses(model, text, 10**6)


def test_groups_and_errors_of_losses():
    rng = np.random.default_rng(0)
    block = np.repeat(np.arange(400), 5)
    loss = 2 + rng.normal(size=400)[block]  # one value per block: five tokens are worth one
    losses = TokenLosses(loss, np.tile([1, 2, 3, 4, 9], 400), block)
    assert losses.standard_error() == pytest.approx(1 / 20, rel=0.1)
    assert TokenLosses(loss[:5], np.arange(5), block[:5]).standard_error() is None
    grouped = losses.by_position(16)
    assert {name: count for name, (_, count) in grouped.items()} == {"1": 400, "2-3": 800, "4-7": 400, "8-15": 400}
    assert grouped["8-15"][0] == pytest.approx(loss[4::5].mean())


def test_everything_at_once(pretrained, vocabulary):
    model, text = load_model(pretrained, vocabulary)
    content = evaluate(model, text, TextEncoder(vocabulary), sentences=10, tokens=300)
    assert 0 <= content["order"]["accuracy"] <= 1 and content["loss"]["error"] > 0
    by_position = content["loss"]["by_position"].values()
    assert sum(count for _, count in by_position) == content["loss"]["tokens"]
    sums, tokens = (np.array(content["loss"]["blocks"][name].split(), dtype=float) for name in ("nats", "tokens"))
    assert len(sums) == len(tokens) > 1 and tokens.sum() == content["loss"]["tokens"]
    assert sums.sum() / tokens.sum() == pytest.approx(content["loss"]["mean"], abs=1e-3)


def test_models_trained_in_autocast_are_evaluated_in_float32(nopos, vocabulary, tmp_path):
    """In bfloat16 a model without positions would prefer one order by rounding alone."""
    state = read_checkpoint(nopos)
    state["cfg"]["model"]["autocast"] = "bf16"
    torch.save(state, tmp_path / "autocast.pt")
    model, text = load_model(tmp_path / "autocast.pt", vocabulary)
    margins = order_sensitivity(model, held_out_sentences(text, TextEncoder(vocabulary), 8, 126))
    assert np.abs(margins).max() < 1e-4


def test_small_data_are_told_the_options_that_serve_them(pretrained, vocabulary, tmp_path):
    words = ["order", str(pretrained), f"--data={vocabulary}", f"--output={tmp_path / 'out'}"]
    for name in ("--sentences", "--tokens"):
        refused = CliRunner().invoke(main, words)
        option, value = re.search(r"valid here: (--\w+) (\d+) or fewer", refused.output).groups()
        assert refused.exit_code == 2 and option == name and not (tmp_path / "out").exists()
        words.append(f"{option}={value}")
    assert CliRunner().invoke(main, words).exit_code == 0


def test_losses_on_other_masks_are_named(pretrained, vocabulary, tmp_path):
    state = read_checkpoint(pretrained)
    state["cfg"]["task"]["mask_prob"] = 0.3
    torch.save(state, tmp_path / "more.pt")
    words = [str(pretrained), f"other={tmp_path}/more.pt", f"--data={vocabulary}", f"--output={tmp_path / 'out'}"]
    result = CliRunner().invoke(command, [*words, "--sentences=4", "--tokens=200"])
    assert result.exit_code == 0, result.output
    assert "other: its loss is not comparable with that of the first model (mask_prob 0.3, not 0.15)" in result.output


def test_attention_weights_of_a_later_layer():
    model = build_masked_lm("tupe_r_tiny", max_positions=16).eval()
    tokens = torch.randint(4, 40, (2, 16))
    _, hiddens = model.tupe.encoder(tokens, return_all_hiddens=True)
    q, k, _ = model.tupe.encoder.layers[1].attention.project(hiddens[1])
    terms = model.tupe.encoder.layer_inputs(tokens.size(1))[1]
    expected = Plain().weights(q, k, None, terms.prepared, model.tupe.encoder.positions.scale)
    torch.testing.assert_close(attention_weights(model.tupe.encoder, tokens)[1], expected)
