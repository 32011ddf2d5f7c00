"""The encoder against the released implementation's numbers, and against properties every encoder must have."""

import cProfile
import hashlib
import math
import pstats
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tupe.attention import NORMALISERS, Plain, Prepared
from tupe.backends import BACKENDS
from tupe.checkpoints.convert import RELEASED, rename, weights_from_released
from tupe.encoder import (
    ACTIVATIONS,
    BLOCKS,
    NORMS,
    ClassificationHead,
    Encoder,
    GatedAttentionLayer,
    LayerInputs,
    LMHead,
    ModelConfig,
    Shared,
)
from tupe.packing import NO_PADDING
from tupe.positions import CLS, Positions
from tupe.schemes import SCHEMES
from tupe.token_positions import SAMPLINGS

PAD = 1
REFERENCE = np.load(Path(__file__).parent / "tupe_reference.npz")
POSITION = {"tupe_a": "untied", "tupe_r": "untied+t5"}


def released_model(which):
    vocab, layers, width, ffn, heads, max_positions = REFERENCE[f"{which}/dims"].tolist()
    parts = {
        "encoder": Encoder(
            vocab, PAD, layers=layers, width=width, ffn=ffn, heads=heads, max_positions=max_positions,
            position=POSITION[which], cls="untied",
        ),
        "lm_head": LMHead(width, vocab),
        "classifier": ClassificationHead(width, width, 3, 0.1),
    }  # fmt: skip
    prefix = f"{which}/state/"
    state = {k[len(prefix) :]: torch.from_numpy(REFERENCE[k]) for k in REFERENCE.files if k.startswith(prefix)}
    weights, _ = weights_from_released(state)
    states = {part: {} for part in parts}
    for name, value in weights.items():
        part, _, key = name.replace("classification_heads.sentence_classification_head", "classifier").partition(".")
        states[part][key] = value
    for part, module in parts.items():
        module.load_state_dict(states[part])
        module.eval()
    return parts


def close(ours, theirs):
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("which", ["tupe_a", "tupe_r"])
def test_equals_released_implementation(which, case):
    parts = released_model(which)
    tokens = torch.from_numpy(REFERENCE[f"{which}/case{case}/tokens"])
    real = tokens.ne(PAD)
    features, _ = parts["encoder"](tokens)
    logits = parts["lm_head"](features, parts["encoder"].tokens.weight)
    classes = parts["classifier"](features[:, 0])
    loss = F.cross_entropy(logits[real], tokens[real]) + F.cross_entropy(classes, torch.arange(len(tokens)) % 3)
    loss.backward()

    expected = {k.split("/", 2)[2]: REFERENCE[k] for k in REFERENCE.files if k.startswith(f"{which}/case{case}/")}
    close(features[real], expected.pop("features")[real.numpy()])
    close(logits[real], expected.pop("logits")[real.numpy()])
    close(classes, expected.pop("cls_logits"))
    close(loss, expected.pop("loss"))
    expected.pop("tokens")
    parameters = dict(parts["encoder"].named_parameters())
    assert {k for k in expected if not k.startswith("grad/")} == set() and len(expected) >= 4
    for key, gradient in expected.items():
        name = rename("decoder.sentence_encoder." + key[len("grad/") :], RELEASED)
        close(parameters[name.removeprefix("encoder.")].grad, gradient)


# ---- normalisers and gated attention units, by their papers' formulas ----

FORMULAS = {  # logits of the real keys of one row -> weights
    "softmax": lambda row: [math.exp(b) / sum(map(math.exp, row)) for b in row],
    "l2": lambda row: [math.exp(b) / math.sqrt(sum(math.exp(2 * c) for c in row)) for b in row],
    "exp": lambda row: [math.exp(b) for b in row],
    "relu2": lambda row: [max(b, 0) ** 2 / len(row) for b in row],
    "swish_l2": lambda row: [swish(b) / math.sqrt(sum(swish(c) ** 2 for c in row)) for b in row],
}


def swish(b):
    return b / (1 + math.exp(-b))


@pytest.mark.parametrize("real", [7, 4])
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_normaliser_formula(normaliser, real):
    logits = 2 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = None if real == 7 else torch.arange(7) < real
    if normaliser == "softmax" and real < 7:  # gets padding as -inf
        logits, mask = logits.masked_fill(~mask, -math.inf), None
    expected = torch.zeros_like(logits)
    for row, weights in zip(logits.tolist(), expected, strict=True):
        weights[:real] = torch.tensor(FORMULAS[normaliser](row[:real]), dtype=torch.float64)
    torch.testing.assert_close(NORMALISERS[normaliser](logits, mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("normaliser", ["relu2", "softmax", "l2"])
def test_gated_attention_unit_formula(normaliser):
    torch.manual_seed(0)
    length, width = 5, 6
    config = ModelConfig(width=width, heads=2, layers=1, normaliser=normaliser)
    dims = GatedAttentionLayer.dims(length, width, heads=2, layers=1)
    assert (dims.heads, dims.head_dim, dims.value_dim) == (1, 128, 2 * width)
    layer = GatedAttentionLayer(dims, config).double().eval()
    positions = Positions("nopos", dims)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, length, width, dtype=torch.float64)

    def silu(linear, row):
        row = linear.weight @ row + linear.bias
        return row / (1 + torch.exp(-row))

    rows = []
    z, v = [silu(layer.z, row) for row in x[0]], [silu(layer.v, row) for row in x[0]]
    for i in range(length):
        q = z[i] * layer.scale[0] + layer.shift[0]
        logits = [(q @ (z[j] * layer.scale[1] + layer.shift[1])).item() / math.sqrt(128) for j in range(length)]
        mixed = sum(a * v_j for a, v_j in zip(FORMULAS[normaliser](logits), v, strict=True))
        y = x[0, i] + layer.out.weight @ (silu(layer.u, x[0, i]) * mixed) + layer.out.bias
        y = (y - y.mean()) / torch.sqrt(y.var(unbiased=False) + layer.norm.eps)
        rows.append(y * layer.norm.weight + layer.norm.bias)
    places, backend = positions.token_positions(length), Plain(normaliser)
    ours = layer(x, LayerInputs(Shared(positions, backend), places, NO_PADDING, Prepared(), 0))
    torch.testing.assert_close(ours[0], torch.stack(rows), rtol=1e-10, atol=1e-10)


def test_choices_are_what_the_model_has():
    """`ModelConfig` lists them without torch."""
    has = {
        "cls": ("auto", *CLS), "normaliser": NORMALISERS, "block": BLOCKS, "norm": ("auto", *NORMS),
        "activation": ("auto", *ACTIVATIONS), "places": SAMPLINGS, "attention": ("auto", *BACKENDS),
    }  # fmt: skip
    listed = {option.name: option.metadata["choices"] for option in fields(ModelConfig)}
    assert {name: listed[name] for name in has} == {name: tuple(words) for name, words in has.items()}


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_l2_starts_with_smaller_values(normaliser):
    """l2 rows of n equal weights sum to sqrt(n): W_V and W_O together take that back; W_Q and W_K stay."""
    n, width = 256, 128
    sizes = {"layers": 1, "width": width, "ffn": 4, "heads": 2, "max_positions": n}
    torch.manual_seed(0)
    attention = Encoder(10, PAD, position="t5", normaliser=normaliser, **sizes).layers[0].attention
    w_q, w_k, w_v = attention.qkv.weight.chunk(3)
    shrink = n**-0.25 if normaliser in ("l2", "swish_l2") else 1
    for weight, expected in [(w_q, 0.02), (w_k, 0.02), (w_v, 0.02 * shrink), (attention.out.weight, 0.02 * shrink)]:
        assert weight.std().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("backend", ["plain", "auto", "sdpa"])
@pytest.mark.parametrize("position", ["absolute", "t5+shaw+shaw_values", "untied", "window:size:16:every:0"])
def test_columns_that_compiled_layers_append_change_nothing(position, backend, kind):
    """Also not which positions are drawn."""
    if backend == "sdpa" and "shaw" in position:
        pytest.skip("has terms that need all weights")
    encoder = Encoder(
        vocab=50, pad=1, layers=2, width=8, heads=2, ffn=8, max_positions=128, places=kind, position=position,
        dropout=0.0, attention_dropout=0.0, attention=backend,
    )  # fmt: skip
    tokens, found = torch.randint(4, 50, (2, 100)), []
    tokens[1, 70:] = 1
    for encoder.compiled in (False, True):
        assert encoder.pad_columns(tokens, None)[0].size(1) == (128 if encoder.compiled else 100)
        torch.manual_seed(1)
        features, _ = encoder(tokens)
        found.append(features[tokens.ne(1)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("position, columns", [("absolute", [64, 100]), ("rope", [64, 128, 192])])
def test_compiled_layers_meet_few_lengths(position, columns):
    """Beyond max_positions, too, where the encoding has positions there."""
    encoder = Encoder(vocab=50, pad=1, layers=1, width=8, heads=2, ffn=8, max_positions=100, position=position)
    encoder.compiled = True
    lengths = [length for length in (50, 65, 100, 130, 192) if length <= 64 * len(columns)]
    padded = [encoder.pad_columns(torch.ones(1, length, dtype=torch.long), None)[0].size(1) for length in lengths]
    assert sorted(set(padded)) == columns


@pytest.mark.parametrize("position", SCHEMES)
def test_one_seed_gives_one_set_of_shared_weights(position):
    """Whatever the encoding, what is not part of it starts from the same weights, and what is built next, too."""

    def digest(name):
        torch.manual_seed(7)
        encoder = Encoder(12, PAD, layers=2, width=8, ffn=16, heads=2, max_positions=6, position=name)
        head = LMHead(8, 12)
        shared = [*encoder.named_parameters(), *head.named_parameters()]
        content = b"".join(p.detach().numpy().tobytes() for key, p in shared if not key.startswith("positions."))
        own = torch.cat([p.flatten() for p in encoder.positions.parameters()] or [torch.zeros(0)])
        return hashlib.sha256(content).hexdigest(), own

    (expected, _), (all_but_positions, own) = digest("nopos"), digest(position)
    assert all_but_positions == expected
    assert torch.equal(digest(position)[1], own)  # the encoding's own weights follow the seed, too


def calls_of(layers, position, padding):
    model = Encoder(40, PAD, position=position, cls="auto", layers=layers, width=32, ffn=64, heads=2, max_positions=32)
    tokens, profile = torch.randint(4, 40, (2, 16)), cProfile.Profile()
    tokens[1, 16 - padding :] = PAD
    with torch.no_grad():
        model.eval()(tokens)
        profile.enable()
        model(tokens)
        profile.disable()
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("position", ["absolute", "untied+t5", "rope", "rope+window:size:4"])
def test_a_layer_takes_few_calls(position, padding):
    """Calls of Python functions and of what they call, which take longer than the work itself where a model is small.
    transformers' BERT takes 233 by the same count; 284, 294, 332 and 349 here, with torch 2.13 on a processor where
    oneDNN multiplies."""
    assert (calls_of(8, position, padding) - calls_of(4, position, padding)) / 4 <= 350
