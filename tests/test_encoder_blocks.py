"""The parts of a block, by formulas of the architectures that have them, and against transformers' ModernBERT."""

import json

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


def test_an_unknown_block_is_refused():
    with pytest.raises(ValueError, match="unknown block 'rnn'; valid: transformer, gau, modern"):
        ModelConfig(block="rnn")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_of_large_numbers_in_half_precision(dtype):
    norm = NORMS["rms"](16, 1e-5).to(dtype)
    x = torch.full((1, 16), 1000.0, dtype=dtype)  # its square is no half
    assert norm(x).dtype == dtype and torch.equal(norm(x), torch.ones_like(x))


# ---- transformers' ModernBERT


def hugging_face_modernbert(folder, layers=5, every=3):
    transformers = pytest.importorskip("transformers", minversion="4.48")
    torch.manual_seed(0)
    words = ["[PAD]", "a", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"t{i}" for i in range(24))]
    special = {"pad_token_id": 0, "bos_token_id": 3, "cls_token_id": 3, "eos_token_id": 4, "sep_token_id": 4}
    config = transformers.ModernBertConfig(
        vocab_size=len(words) + 2, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, local_attention=8, global_attn_every_n_layers=every,
        norm_eps=1e-3, **special,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.ModernBertForMaskedLM(config).eval()
    for p in model.parameters():
        p.data += torch.randn(p.shape) * 0.2
    model.save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.add_special_tokens([word for word in words if word.startswith("[")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, words


def test_equals_modernbert_of_transformers(tmp_path):
    """On converted random weights: hidden states and logits."""
    convert = pytest.importorskip("tupe.checkpoints.convert")
    theirs, words = hugging_face_modernbert(tmp_path / "theirs")
    trained = convert.read_model(convert.convert(tmp_path / "theirs", "tupe", None, tmp_path / "ours"))
    model = trained.model()
    assert trained.architecture.startswith("modernbert") and trained.config.layer_norm_eps == 1e-3

    order, _ = convert.bert_tokens(tmp_path / "theirs")
    ids = torch.randint(2, len(words), (2, 40))
    ids[:, 0], ids[1, 25:] = 3, 0
    real, mine = ids.ne(0), order.argsort()[ids]
    assert torch.equal(mine.eq(1), ~real)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long(), output_hidden_states=True)
        out = model(mine, output_hidden_states=True)
        features, logits = model.tupe(mine).last_hidden_state, out.logits
    assert len(out.hidden_states) == len(expected.hidden_states) == 6
    for one, other in zip(out.hidden_states[:-1], expected.hidden_states[:-1], strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features[real], theirs.model(ids, real.long())[0][real].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[real], expected.logits[real][:, order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_bias", True, "norm_bias is True"), ("layer_types", ["sliding_attention"] * 5, "every n-th layer"),
        ("rope_parameters", {}, "no rope_parameters of both kinds"), ("layer_types", None, "no layer_types"),
        ("rope_scaling", {"type": "dynamic", "factor": 2}, "rotations of the kind 'dynamic'"),
        (
            "rope_parameters",
            {
                "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 160000},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
            },
            "rotations of the kind 'linear'; only 'default' is converted",
        ),
    ],
)  # fmt: skip
def test_another_modernbert_is_refused(key, value, message, tmp_path):
    convert = pytest.importorskip("tupe.checkpoints.convert")
    hugging_face_modernbert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {"rope_parameters": ["global_rope_theta", "local_rope_theta"], "layer_types": ["global_attn_every_n_layers"]}
    for name in old.get(key, []):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match=message):
        convert.from_modernbert(tmp_path)


@pytest.mark.parametrize("size, layers, width, heads, ffn", [("", 22, 768, 12, 1152), ("_large", 28, 1024, 16, 2624)])
def test_sizes_are_those_of_the_released_models(size, layers, width, heads, ffn):
    transformers = pytest.importorskip("transformers", minversion="4.48")
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn}
    with torch.device("meta"):
        theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))
        encoder = Encoder(theirs.config.vocab_size, PAD, max_positions=8192, **preset(f"modernbert{size}"))
        ours = encoder, LMHead(width, theirs.config.vocab_size, config=encoder.config)
    assert sum(p.numel() for part in ours for p in part.parameters()) == theirs.num_parameters()
