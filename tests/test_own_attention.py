"""Encodings in attention that somebody else wrote: the encoder's results, later tokens hidden, one compiled graph, and
the page's examples."""

import contextlib
import io
import re

import pytest
import torch
from helpers import PLUGIN
from torch import nn
from torch.utils.checkpoint import checkpoint

from tupe.encoder import Encoder
from tupe.own_attention import PositionEncoding
from tupe.positions import overrides, parse
from tupe.schemes import SCHEMES

NAMES = ["window:size:3" if name == "window" else name for name in SCHEMES]
SUMS = ["untied+t5", "rope+window:size:3", "absolute+t5", "t5+urpe", "shaw:layer"]
UNTIED = ["untied+t5", "alibi+window:size:3", "deberta"]
B, L, HEADS, WIDTH = 2, 10, 4, 32


def is_causal(position):
    return all(SCHEMES[one.name].causal for one in parse(position))


class Layer(nn.Module):
    """Attention as others write it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        return [y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, x, terms, index):
        y = terms.attention(*self.project(x), index, project=self.project, x=x)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, position, cls="tied", attention="auto"):
        super().__init__()
        self.positions = PositionEncoding(
            position, width=WIDTH, heads=HEADS, layers=2, max_positions=16, cls=cls, attention=attention
        )
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, mask=None, causal=False):
        x, terms = self.positions(x, mask=mask, causal=causal)
        for index, layer in enumerate(self.layers):
            x = layer(x, terms, index)
        return x


def padding():
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[1, 7:] = False
    return mask


def test_encodings_start_as_in_the_encoder():
    """BERT's values: PyTorch's own are an order of magnitude larger."""
    layers = [
        part for part in PositionEncoding("cpb+untied", width=256, heads=4).modules() if isinstance(part, nn.Linear)
    ]
    assert len(layers) >= 4
    for layer in layers:
        assert layer.bias is None or not layer.bias.any()
        assert 0.015 < layer.weight.std() < 0.025


@pytest.mark.parametrize("position, cls", [(n, "tied") for n in NAMES + SUMS] + [(n, "untied") for n in UNTIED])
def test_equals_the_encoder(position, cls):
    torch.manual_seed(0)
    options = {"width": WIDTH, "heads": HEADS, "layers": 2, "ffn": 64, "max_positions": 16, "attention": "plain"}
    encoder = Encoder(20, 1, position=position, cls=cls, **options).eval()
    own = PositionEncoding(position, width=WIDTH, heads=HEADS, layers=2, max_positions=16, cls=cls).eval()
    own.positions.load_state_dict(encoder.positions.state_dict())
    mask, tokens = padding(), torch.randint(3, 20, (B, L))
    tokens[~mask] = 1
    x, terms = own(encoder.tokens(tokens), mask=mask)
    x = encoder.embed_norm(x)
    for index, layer in enumerate(encoder.layers):
        q, k, v = layer.attention.project(x)
        y = terms.attention(q, k, v, index, project=layer.attention.project, x=x)
        x = layer.attention_norm(x + layer.attention.out(y.transpose(1, 2).flatten(2)))
        x = layer.ffn_norm(x + layer.feed_forward(x))
    torch.testing.assert_close(x[mask], encoder(tokens)[0][mask], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("position", [name for name in NAMES + SUMS if is_causal(name)])
def test_causal_attention_sees_no_later_token(position):
    """A sequence that is cut after six tokens has the same outputs, and the same gradients, for these six."""
    torch.manual_seed(0)
    model, x = Model(position).double(), torch.randn(B, L, WIDTH, dtype=torch.double)
    whole, cut = model(x, causal=True)[:, :6], model(x[:, :6], causal=True)
    torch.testing.assert_close(whole, cut)
    used = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(y.square().sum(), used, allow_unused=True) for y in (whole, cut)]
    for of_whole, of_cut in zip(*gradients, strict=True):
        if of_cut is not None:
            torch.testing.assert_close(of_whole, of_cut, atol=1e-5, rtol=1e-4)  # some terms are float32


@pytest.mark.parametrize("position", ["rope", "untied+t5", pytest.param("all", marks=pytest.mark.thorough)])
def test_compiles_to_one_graph(position):
    for name in NAMES + SUMS if position == "all" else [position]:
        torch._dynamo.reset()
        model, x = Model(name), torch.randn(B, L, WIDTH)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for mask, causal in ((None, False), (padding(), False), (None, is_causal(name))):
            kept = slice(None) if mask is None else mask
            torch.testing.assert_close(
                compiled(x, mask, causal)[kept], model(x, mask, causal)[kept], atol=1e-5, rtol=1e-4
            )
        if (
            name != "pope"
        ):  # whose queries are wider than its values: this backend's backward pass fails, inductor's does not
            compiled(x).sum().backward()


def test_attention_for_one_layer_and_the_plain_formula():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, HEADS, L, 8)
    one = PositionEncoding("alibi", width=WIDTH, heads=HEADS)
    distance = (torch.arange(L)[:, None] - torch.arange(L)).abs()
    slopes = torch.tensor([2.0**-n for n in (2, 4, 6, 8)])  # Press et al., 2022, for 4 heads
    logits = q @ k.transpose(2, 3) / 8**0.5 - slopes[:, None, None] * distance
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(one.attention(q, k, v, causal=True), expected)
    plain = PositionEncoding("alibi", width=WIDTH, heads=HEADS, attention="plain")
    torch.testing.assert_close(plain.attention(q, k, v, causal=True), expected)


@pytest.mark.parametrize("position", [name for name in NAMES if name != "nopos"] + SUMS)
def test_checkpointed_layers_have_the_same_gradients(position):
    """What all layers share is computed before them: inside of a layer that is checkpointed it would have none."""
    torch.manual_seed(0)
    model, x = Model(position), torch.randn(B, L, WIDTH)
    used = [p for p in model.parameters() if p.requires_grad]
    whole = torch.autograd.grad(model(x, padding()).square().sum(), used, allow_unused=True)
    for layer in model.layers:
        call = layer.forward
        layer.forward = lambda *args, call=call: checkpoint(call, *args, use_reentrant=False)
    again = torch.autograd.grad(model(x, padding()).square().sum(), used, allow_unused=True)
    for a, b in zip(whole, again, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("position", ["t5", "rope", "untied+t5"])
def test_normed_queries_under_autocast(position):
    """Layer norms of q and k give float32 there, beside values in bfloat16."""
    torch.manual_seed(0)
    encoding = PositionEncoding(position, width=WIDTH, heads=HEADS)
    x = torch.randn(B, L, WIDTH)
    q, k, v = (torch.randn(B, HEADS, L, 8, requires_grad=True) for _ in range(3))
    expected = encoding(x, mask=padding())[1].attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        _, terms = encoding(x, mask=padding())
        found = terms.attention(q, k, v.bfloat16())
        assert list(terms.prepared) in ([], [(0, None, torch.bfloat16)])
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
    found.sum().backward()
    assert q.grad.abs().sum() > 0


def test_all_layers_share_what_depends_on_positions_alone(monkeypatch):
    calls = []
    untied = SCHEMES["untied"]
    monkeypatch.setattr(untied, "bias", lambda *args, bias=untied.bias: calls.append(1) or bias(*args))
    assert overrides(untied, "bias")
    Model("untied+t5")(torch.randn(B, L, WIDTH)).sum().backward()
    assert len(calls) == 1


def test_refusals_say_what_to_pass():
    q = torch.randn(B, HEADS, L, 8)
    with pytest.raises(ValueError, match="width=30 is not a multiple of heads=4; give head_dim"):
        PositionEncoding("rope", width=30, heads=4)
    rope = PositionEncoding("rope", width=WIDTH, heads=HEADS)
    for mask in (torch.ones(B, L), torch.ones(B, 1, L, L, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"valid: torch.bool of shape \[2, 10\], True at tokens"):
            rope.attention(q, q, q, mask=mask)
    with pytest.raises(ValueError, match="log_length, which needs later tokens; leave log_length out"):
        PositionEncoding("rope+log_length", width=WIDTH, heads=HEADS).attention(q, q, q, causal=True)
    for position, argument in (("deberta_v2", "project="), ("cable", "x="), ("selective_rope", "x=")):
        with pytest.raises(ValueError, match=f"the encoding {position} needs {argument}, the layer's "):
            PositionEncoding(position, width=WIDTH, heads=HEADS).attention(q, q, q, layer=0)
    for position in ("absolute", "t5+sinusoidal"):
        with pytest.raises(ValueError, match=r"adds vectors to the .* call x, terms = positions\(x\) before"):
            PositionEncoding(position, width=WIDTH, heads=HEADS).attention(q, q, q)
    for position in ("window:size:4", "rope:local:True", "shaw:layer", "deberta", "log_length:every:2"):
        encoding = PositionEncoding(position, width=WIDTH, heads=HEADS, layers=3)
        with pytest.raises(ValueError, match="needs layer=, the layer's index"):
            encoding.attention(q, q, q)
        encoding.attention(q, q, q, layer=1)
    _, terms = PositionEncoding("t5", width=WIDTH, heads=HEADS)(torch.randn(B, L, WIDTH))
    with pytest.raises(ValueError, match=r"layer is a tensor; .* `positions\(x, mask=mask\)`"):
        terms.attention(q, q, q, torch.ones(B, L, dtype=torch.bool))
    with pytest.raises(ValueError, match="exceeds the limit of 512 positions"):
        PositionEncoding("absolute", width=WIDTH, heads=HEADS)(torch.randn(1, 513, WIDTH))


@pytest.mark.parametrize("position", ["rope", "t5"])
@pytest.mark.parametrize(
    "q, k, v, what",
    [
        ((B, HEADS, 1, 8), (B, HEADS, L, 8), (B, HEADS, L, 8), r"k is \[2, 4, 10, 8\]; valid: \[2, 4, 1, 8\]"),
        ((B, L, HEADS, 8),) * 3 + (r"q is \[2, 10, 4, 8\]; valid: \[2, 4, 4, 8\]",),
        ((B, 2, L, 8),) * 3 + (r"q is \[2, 2, 10, 8\]; valid: \[2, 4, 10, 8\]",),
        ((B, HEADS, L, 8), (B, 2, L, 8), (B, 2, L, 8), "repeat heads that queries share"),
        ((B, HEADS, L, 16),) * 3 + (r"q is \[2, 4, 10, 16\]; valid: \[2, 4, 10, 8\]",),
        ((B, HEADS, L, 8), (B, HEADS, L, 8), (B, HEADS, 9, 8), "v is"),
    ],
)
def test_vectors_of_another_shape_are_refused(position, q, k, v, what):
    encoding = PositionEncoding(position, width=WIDTH, heads=HEADS)
    with pytest.raises(ValueError, match=what):
        encoding.attention(torch.randn(q), torch.randn(k), torch.randn(v))


@pytest.mark.parametrize("layer", [1, -1])
def test_layers_that_the_encoding_does_not_have_are_refused(layer):
    q = torch.randn(B, HEADS, L, 8)
    with pytest.raises(ValueError, match=rf"layer={layer}; valid: 0 to 0. Give layers="):
        PositionEncoding("t5:layer", width=WIDTH, heads=HEADS).attention(q, q, q, layer=layer)
    with pytest.raises(ValueError, match=rf"layer={layer}; valid: 0 to 0. Give layers="):  # whose projections differ
        PositionEncoding("deberta", width=WIDTH, heads=HEADS).attention(q, q, q, layer=layer)


def test_the_page_prints_what_it_shows():
    page = (PLUGIN.parent / "docs" / "own-attention.md").read_text()
    names = {}
    examples = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(examples) == page.count("```python")
    for code, shown in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
