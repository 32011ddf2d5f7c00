"""The parts of a block, by formulas of the architectures that have them; ModernBERT's sizes by transformers."""

import pytest
import torch

from tupe.attention import Plain, attend
from tupe.common.architectures import OTHER_BLOCKS, preset
from tupe.encoder import ACTIVATIONS, BLOCK_DEFAULTS, NORMS, Encoder, LMHead, ModelConfig
from tupe.positions import LayerContext

PAD, V = 1, 30
MODERN = [name for name, options in OTHER_BLOCKS.items() if options["block"] == "modern"]


def tokens():
    return torch.randint(3, V, (2, 20), generator=torch.Generator().manual_seed(1))


def build(config):
    """An encoder and a head whose every parameter matters, in float64."""
    torch.manual_seed(0)
    parts = Encoder(V, PAD, config=config).double().eval(), LMHead(config.width, V, config=config).double()
    for p in (p for part in parts for p in part.parameters()):
        p.data += 0.3 * torch.randn_like(p)
    return parts


def tiny(name, **options):
    own = {**preset(f"{name}_tiny"), "layers": 4, "width": 16, "ffn": 24, "heads": 2, "max_positions": 32, **options}
    own["position"] = own["position"].replace("window", "window:size:8")
    return ModelConfig(**own)


# ---- the architectures, a few lines each. state: the weights by our names; attention: q, k, v [L, C] -> [L, C]


def modernbert(state, attention, x, layer):
    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[name]

    if layer == "embeddings":
        return norm(x, "embed_norm.weight")
    if layer == "end":
        return norm(x, "final_norm.weight")
    y = x if layer == 0 else norm(x, f"layers.{layer}.attention_norm.weight")
    q, k, v = (y @ state[f"layers.{layer}.attention.qkv.weight"].T).chunk(3, -1)
    x = x + attention(q, k, v) @ state[f"layers.{layer}.attention.out.weight"].T
    a, b = (norm(x, f"layers.{layer}.ffn_norm.weight") @ state[f"layers.{layer}.fc1.weight"].T).chunk(2, -1)
    gelu = a * (1 + torch.erf(a / 2**0.5)) / 2
    return x + (gelu * b) @ state[f"layers.{layer}.fc2.weight"].T


def neobert(state, attention, x, layer):
    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[name]

    if layer == "embeddings":
        return x
    if layer == "end":
        return norm(x, "final_norm.weight")
    y = norm(x, f"layers.{layer}.attention_norm.weight")
    q, k, v = (y @ state[f"layers.{layer}.attention.qkv.weight"].T).chunk(3, -1)
    x = x + attention(q, k, v) @ state[f"layers.{layer}.attention.out.weight"].T
    a, b = (norm(x, f"layers.{layer}.ffn_norm.weight") @ state[f"layers.{layer}.fc1.weight"].T).chunk(2, -1)
    return x + (a * torch.sigmoid(a) * b) @ state[f"layers.{layer}.fc2.weight"].T


def ltg_bert(state, attention, x, layer):
    def norm(x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-7).sqrt()

    def linear(x, name):
        return x @ state[f"layers.{layer}.{name}.weight"].T + state.get(f"layers.{layer}.{name}.bias", 0)

    if layer in ("embeddings", "end"):
        return norm(x)
    y = linear(attention(*linear(norm(x), "attention.qkv").chunk(3, -1)), "attention.out")
    gain, shift = (state[f"layers.{layer}.attention.norm.{kind}"] for kind in ("weight", "bias"))
    x = x + norm(y) * gain + shift
    a, b = linear(norm(x), "fc1").chunk(2, -1)
    gelu = a / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)))
    return x + linear(norm(gelu * b), "fc2")


@pytest.mark.parametrize("architecture", [modernbert, neobert, ltg_bert], ids=lambda function: function.__name__)
def test_architecture_formula(architecture):
    """Attention itself is that of the position schemes, whose formulas have tests of their own."""
    encoder, _ = build(tiny(architecture.__name__))
    (row,), state, places = tokens()[:1], encoder.state_dict(), encoder.positions.token_positions(20)
    backend = Plain()
    x = architecture(state, None, state["tokens.weight"][row], "embeddings")
    expected = [x]
    for index, inputs in enumerate(encoder.layer_inputs(20)):

        def attention(q, k, v, index=index, inputs=inputs):
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1)[None] for part in (q, k, v))  # [1, H, L, D]
            layer = LayerContext(index, places, encoder.layers[index].attention.project)
            mixed = attend(q, k, v, encoder.positions, inputs.prepared, layer, backend)
            return mixed[0].transpose(0, 1).flatten(1)

        x = architecture(state, attention, x, index)
        expected.append(x)
    expected[-1] = architecture(state, None, x, "end")
    features, hiddens = encoder(row[None], return_all_hiddens=True)
    assert len(hiddens) == 5 and torch.equal(hiddens[-1], features)
    twice = 1e-4 if architecture is ltg_bert else 1e-9  # its first layer normalises what is normalised
    torch.testing.assert_close(torch.cat(hiddens), torch.stack(expected), rtol=twice, atol=twice)


CHANGES = [
    {"norm_order": "post"}, {"norm_order": "pre"}, *({"norm": word} for word in NORMS),
    *({"activation": word} for word in ACTIVATIONS), {"linear_bias": "attention"}, {"embed_norm": "no"},
    *({"linear_bias": word, "inner_norms": word, "embed_norm": word} for word in ("yes", "no")),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change.values()))
@pytest.mark.parametrize("block", ["transformer", "modern"])
def test_each_part_is_an_option(block, change):
    """A word changes its part alone: the blocks are what their parts are."""
    parts = {**BLOCK_DEFAULTS[block], **change}
    sizes = {"layers": 2, "width": 16, "ffn": 24, "heads": 2, "max_positions": 32, "position": "rope"}
    encoder, head = build(ModelConfig(block=block, **change, **sizes))
    other, _ = build(ModelConfig(block={"transformer": "modern", "modern": "transformer"}[block], **parts, **sizes))
    assert encoder.config.unlike_bert() == {p: w for p, w in parts.items() if w != BLOCK_DEFAULTS["transformer"][p]}
    features, _ = encoder(tokens())
    assert torch.equal(features, other(tokens())[0])
    head(features, encoder.tokens.weight).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())
    norms = {"layer": 2, "layer_no_bias": 1, "layer_plain": 0, "rms": 1}[parts["norm"]]  # parameters of one
    pre, embedded, more = (parts[part] in ("pre", "yes") for part in ("norm_order", "embed_norm", "inner_norms"))
    count = 4 + pre + embedded - (pre and embedded) + 2 * more  # without the first layer's, behind the embeddings'
    inner = 4 * more  # attention's own have a gain and a shift each
    biases = 2 * {"yes": 4, "attention": 2, "no": 0}[parts["linear_bias"]]
    assert len(list(encoder.parameters())) == 1 + 2 * 4 + count * norms + inner + biases
    gated = parts["activation"] != "gelu"
    assert encoder.layers[0].fc1.weight.shape == (48 if gated else 24, 16)
    assert len(list(head.parameters())) == 2 + norms + (parts["linear_bias"] != "no")


def test_a_gated_attention_unit_has_no_parts():
    for part in BLOCK_DEFAULTS["gau"]:
        word = {"norm": "rms", "norm_order": "pre", "activation": "geglu"}.get(part, "no")
        with pytest.raises(ValueError, match=f"{part}={word} has no meaning"):
            Encoder(V, PAD, block="gau", layers=1, width=8, **{part: word})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_of_large_numbers_in_half_precision(dtype):
    norm = NORMS["rms"](16, 1e-5).to(dtype)
    x = torch.full((1, 16), 1000.0, dtype=dtype)  # its square is no half
    assert norm(x).dtype == dtype and torch.equal(norm(x), torch.ones_like(x))


@pytest.mark.parametrize("size, layers, width, heads, ffn", [("", 22, 768, 12, 1152), ("_large", 28, 1024, 16, 2624)])
def test_sizes_are_those_of_the_released_models(size, layers, width, heads, ffn):
    transformers = pytest.importorskip("transformers", minversion="4.48")
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn}
    with torch.device("meta"):
        theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))
        encoder = Encoder(theirs.config.vocab_size, PAD, max_positions=8192, **preset(f"modernbert{size}"))
        ours = encoder, LMHead(width, theirs.config.vocab_size, config=encoder.config)
    assert sum(p.numel() for part in ours for p in part.parameters()) == theirs.num_parameters()
