"""What the probes read from models, against the models' own numbers."""

import numpy as np
import pytest
import torch
from helpers import attention_weights, build_masked_lm

from tupe.attention import Plain
from tupe.evaluate.probes import identical_word_attention, positional_logits, t5_bias

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(49)), "<mask>"]


def test_identical_words():
    model = build_masked_lm("bert_r_tiny", max_positions=12).eval()
    mean_attention = identical_word_attention(model, SYMBOLS, words=3, seed=5)
    assert mean_attention.shape == (12, 12) and mean_attention.sum(1) == pytest.approx(np.ones(12))
    # By hand: the same words one after the other.
    words = np.random.default_rng(5).choice(np.arange(4, 53), 3, replace=False)
    total = 0
    for word in words:
        tokens = torch.tensor([[0, *[word] * 10, 2]])
        total = total + attention_weights(model.tupe.encoder, tokens)[0][0].mean(0).detach().numpy() / 3
    np.testing.assert_allclose(mean_attention, total, atol=1e-6)


def test_lengths_and_layers_that_do_not_fit_are_refused():
    model = build_masked_lm("tupe_r_tiny", max_positions=16).eval()
    for length in (2, 17):
        with pytest.raises(ValueError, match=f"a length of {length}; valid: 3 to 16"):
            identical_word_attention(model, SYMBOLS, words=2, length=length)
    with pytest.raises(ValueError, match="valid: 2 to 16"):
        positional_logits(model, 17)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer {layer + 1}; .* 1 to 2"):
            positional_logits(model, layer=layer)


def test_positional_logits_are_the_models():
    model = build_masked_lm("tupe_r_tiny", max_positions=16).eval()
    logits = positional_logits(model)
    (terms, *_) = model.tupe.encoder.layer_inputs(16)
    torch.testing.assert_close(logits, terms.prepared.bias)
    assert logits.shape == (2, 16, 16)
    with pytest.raises(ValueError, match="absolute"):
        positional_logits(build_masked_lm("bert_a_tiny"))


def test_t5_bias_by_offset():
    model = build_masked_lm("bert_r_tiny", max_positions=300)
    torch.nn.init.normal_(model.tupe.encoder.positions.t5.table.weight)
    offsets, bias = t5_bias(model)
    logits = positional_logits(model)
    assert offsets[0] == -128 and offsets[-1] == 128
    for offset, value in zip(offsets, bias.T, strict=True):
        assert (logits[:, 150, 150 + offset].numpy() == value).all()
    with pytest.raises(ValueError, match="absolute"):
        t5_bias(build_masked_lm("bert_a_tiny"))


def test_attention_weights_of_a_later_layer():
    model = build_masked_lm("tupe_r_tiny", max_positions=16).eval()
    tokens = torch.randint(4, 40, (2, 16))
    _, hiddens = model.tupe.encoder(tokens, return_all_hiddens=True)
    q, k, _ = model.tupe.encoder.layers[1].attention.project(hiddens[1])
    terms = model.tupe.encoder.layer_inputs(tokens.size(1))[1]
    expected = Plain().weights(q, k, None, terms.prepared, model.tupe.encoder.positions.scale)
    torch.testing.assert_close(attention_weights(model.tupe.encoder, tokens)[1], expected)
