"""Every scheme against its paper's formula, written as naive float64 loops, and properties that hold for the whole
registry.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

import math
import re

import pytest
import torch

from tupe.attention import NORMALISERS, Terms, attend
from tupe.encoder import LAYERS, Encoder
from tupe.positions import Dims, Positions, overrides
from tupe.schemes import SCHEMES, Clipped, Deberta, skew, toeplitz, unskew

B, L, H, D, PAD = 2, 9, 2, 4, 1
DIMS = Dims(max_positions=16, width=H * D, heads=H, layers=3, head_dim=D, value_dim=6)


def scramble(module, seed=0):
    """Make every parameter matter: schemes that start at zero, at one or at N(0, 0.02) hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return module


@pytest.fixture(autouse=True)
def short_clips(monkeypatch):
    """Clip within the L of these tests."""
    for scheme in SCHEMES.values():
        if issubclass(scheme, Clipped | Deberta):
            monkeypatch.setattr(scheme, "max_distance", 3)


# ---- formulas ----


class Formula:
    """A scheme as functions of single positions i (query) and j (key); the defaults are 'no such term'. s is the
    scheme."""

    def __init__(self, s):
        self.s = s

    def embed(self, i):
        return 0.0

    def bias(self, h, i, j, scale):
        return 0.0

    def content(self, h, i, j, q, k, layer):
        return 0.0

    def gate(self, h, i, j):
        return 1.0

    def value(self, i, j):
        return 0.0

    def rotate_qk(self, x, i):
        return x

    def rotate_v(self, x, i):
        return x


def clip(offset, t=3):
    return max(-t, min(t, offset))


def head(x, h):
    return x[h * D : (h + 1) * D]


def wave(omega, position):
    return torch.stack([f(position * w) for w in omega for f in (torch.sin, torch.cos)])


def vaswani(width):
    return torch.tensor([10000 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)


def layer_norm(x, norm):
    x = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + norm.eps)
    return x * norm.weight + norm.bias


class AbsoluteFormula(Formula):
    def embed(self, i):
        return self.s.table.weight[i]


class SinusoidalFormula(Formula):
    def embed(self, i):
        return 0.02 * wave(vaswani(H * D), i)


class SinusoidalLearnedFormula(Formula):
    def embed(self, i):
        return 0.02 * wave(self.s.omega, i)


class UntiedFormula(Formula):
    def p(self, i):
        return layer_norm(self.s.table.weight[i + 1], self.s.norm)

    def q(self, h, i):
        return head(self.s.q.weight @ self.p(i) + self.s.q.bias, h)

    def k(self, h, i):
        return head(self.s.k.weight @ self.p(i) + self.s.k.bias, h)

    def bias(self, h, i, j, scale):
        return scale * self.q(h, i) @ self.k(h, j)


class AbsoluteDFormula(UntiedFormula):
    def content(self, h, i, j, q, k, layer):
        return q @ self.k(h, j) + self.q(h, i) @ k


class T5Formula(Formula):
    firsts = [8, 12, 16, 23, 32, 46, 64, 91]  # smallest distance of buckets 8 .. 15: ceil(8 * 16^(n/8))

    def bucket(self, offset):
        distance = abs(offset)
        index = distance if distance < 8 else 7 + sum(distance >= first for first in self.firsts)
        return index + (16 if offset > 0 else 0)

    def bias(self, h, i, j, scale):
        return self.s.table.weight[self.bucket(j - i), h]


class ClippedFormula(Formula):
    def bias(self, h, i, j, scale):
        return self.s.table.weight[clip(j - i) + 3, h]


class NonParametricFormula(Formula):
    def bias(self, h, i, j, scale):
        return self.s.table[h, i, j]


class FactoredFormula(Formula):
    def bias(self, h, i, j, scale):
        r = self.s.table.weight[clip(j - i) + 3]
        return scale * head(self.s.q.weight @ r, h) @ head(self.s.k.weight @ r, h)


class AlibiFormula(Formula):
    def bias(self, h, i, j, scale):
        return -(2 ** (-8 * (h + 1) / H)) * abs(i - j)


class ShawFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        return q @ self.s.table.weight[clip(j - i) + 3]


class ShawSinusoidalFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        return q @ wave(vaswani(D), clip(j - i))


class ShawSinusoidalLearnedFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        return q @ wave(self.s.omega, clip(j - i))


class ShawValuesFormula(Formula):
    def value(self, i, j):
        return self.s.table.weight[clip(j - i) + 3]


class DebertaFormula(Formula):
    def delta(self, i, j, t=3):
        return max(0, min(2 * t - 1, i - j + t))

    def content(self, h, i, j, q, k, layer):
        layer = layer if len(self.s.q) > 1 else 0
        table, w_q, w_k = self.s.table.weight, self.s.q[layer].weight, self.s.k[layer].weight
        return q @ head(w_k @ table[self.delta(i, j)], h) + k @ head(w_q @ table[self.delta(j, i)], h)


class RopeFormula(Formula):
    def rotate_qk(self, x, i):
        """x as complex numbers times e^{i theta}."""
        turned = torch.view_as_complex(x.unflatten(0, (-1, 2)).contiguous()) * torch.exp(1j * i * vaswani(len(x)))
        return torch.view_as_real(turned).flatten()


class RopeValuesFormula(RopeFormula):
    def rotate_v(self, x, i):
        return self.rotate_qk(x, i)


class UrpeFormula(Formula):
    def gate(self, h, i, j):
        return self.s.table[h, clip(j - i) + 3]


FORMULAS = {
    "nopos": Formula,
    "absolute": AbsoluteFormula,
    "sinusoidal": SinusoidalFormula,
    "sinusoidal_learned": SinusoidalLearnedFormula,
    "untied": UntiedFormula,
    "absolute_d": AbsoluteDFormula,
    "t5": T5Formula,
    "clipped": ClippedFormula,
    "nonparametric": NonParametricFormula,
    "factored": FactoredFormula,
    "alibi": AlibiFormula,
    "shaw": ShawFormula,
    "shaw_sinusoidal": ShawSinusoidalFormula,
    "shaw_sinusoidal_learned": ShawSinusoidalLearnedFormula,
    "shaw_values": ShawValuesFormula,
    "deberta": DebertaFormula,
    "deberta_shared": DebertaFormula,
    "rope": RopeFormula,
    "rope_values": RopeValuesFormula,
    "urpe": UrpeFormula,
}
EXTRA_TERMS = {"untied": 1, "absolute_d": 3, "factored": 1, "deberta": 2, "deberta_shared": 2}


def naive_attention(formulas, q, k, v, scale, layer):
    """Softmax attention as nested loops over the formulas of all schemes."""
    out = torch.zeros_like(v)
    for b in range(q.size(0)):
        for h in range(H):
            for i in range(L):
                logits, values, gates = [], [], []
                for j in range(L):
                    q_i, k_j, v_j = q[b, h, i], k[b, h, j], v[b, h, j]
                    content = sum(f.content(h, i, j, q_i, k_j, layer) for f in formulas)
                    bias = sum(f.bias(h, i, j, scale) for f in formulas)
                    for f in formulas:
                        q_i, k_j, v_j = f.rotate_qk(q_i, i), f.rotate_qk(k_j, j), f.rotate_v(v_j, j)
                    logits.append((q_i @ k_j + content) * scale + bias)
                    values.append((v_j, sum(f.value(i, j) for f in formulas)))
                    gates.append(math.prod(f.gate(h, i, j) for f in formulas))
                weights = torch.softmax(torch.stack(logits), 0)
                for weight, gate, (v_j, extra) in zip(weights, gates, values, strict=True):
                    for f in formulas:
                        v_j = f.rotate_v(v_j, -i)
                    out[b, h, i] += weight * gate * (v_j + extra)
    return out


def random_qkv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, L, D), (B, H, L, D), (B, H, L, DIMS.value_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


COMBINATIONS = [
    "untied+t5", "absolute+shaw", "shaw+shaw_values", "untied+deberta", "t5+urpe", "shaw:layer+urpe:layer", "rope+urpe",
    "sinusoidal_learned+shaw_sinusoidal", "t5:layer+untied",
]  # fmt: skip


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("names", [*SCHEMES, *COMBINATIONS])
def test_formula(names, layer):
    parts = [name.partition(":")[0] for name in names.split("+")]
    if missing := set(parts) - set(FORMULAS):
        pytest.skip(f"no formula in this file yet for {missing}")
    positions = scramble(Positions(names, DIMS).double())
    formulas = [FORMULAS[type_name](s) for type_name, s in zip(positions, positions.of_layer(layer), strict=True)]
    q, k, v = random_qkv()
    scale = 1 / math.sqrt((1 + sum(EXTRA_TERMS.get(name, 0) for name in parts)) * D)

    embed = positions.embed(L)
    for i in range(L):
        expected = sum(f.embed(i) for f in formulas)
        torch.testing.assert_close(torch.zeros(H * D) if embed is None else embed[i], expected + torch.zeros(H * D),
                                   check_dtype=False, atol=2e-6, rtol=1e-5)  # fmt: skip
    bias, gate = positions.terms(L)[layer]
    ours = attend(q, k, v, positions, Terms(positions.scale, bias, gate), layer)
    # content-free terms are float32 by contract (position terms in double would hide what training uses)
    torch.testing.assert_close(ours, naive_attention(formulas, q, k, v, scale, layer), atol=5e-6, rtol=1e-5)


def test_every_shipped_scheme_has_a_formula():
    assert set(FORMULAS) == set(SCHEMES)


def test_t5_buckets_reach_128():
    borders = SCHEMES["t5"].bucket_of(torch.arange(-600, 601)).tolist()
    formula = T5Formula(None)
    assert borders == [formula.bucket(offset) for offset in range(-600, 601)]
    assert 16 not in borders and max(borders) == 31


def test_t5_buckets_equal_hugging_face():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-600, 601)
    theirs = t5.T5Attention._relative_position_bucket(offsets, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(SCHEMES["t5"].bucket_of(offsets), theirs)


def test_alibi_slopes():
    torch.testing.assert_close(SCHEMES["alibi"].slopes_of(8), torch.tensor([2.0**-n for n in range(1, 9)]))
    twelve = SCHEMES["alibi"].slopes_of(12)  # 8 heads' slopes, then every other of 16 heads'
    torch.testing.assert_close(twelve[8:], torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_skew_and_toeplitz(length):
    x = torch.randn(3, length, 2 * length - 1)
    skewed = skew(x)
    for i in range(length):
        for j in range(length):
            assert torch.equal(skewed[:, i, j], x[:, i, j - i + length - 1])
    torch.testing.assert_close(skew(unskew(skewed)), skewed)
    torch.testing.assert_close(toeplitz(x[:, 0], length), skew(x[:, :1].expand(-1, length, -1)))


# ---- [CLS] ----

UNTIEABLE = [n for n in SCHEMES if overrides(SCHEMES[n], "bias", "content", "gate", "value")]


@pytest.mark.parametrize("names", [*UNTIEABLE, "untied+t5", "shaw+shaw_values", "t5:layer+untied"])
def test_cls_reset(names):
    tied, untied = (scramble(Positions(names, DIMS, cls).double()) for cls in ("tied", "untied"))
    tied.load_state_dict(untied.state_dict(), strict=False)
    theta = untied.theta if hasattr(untied, "theta") else untied._sum(untied.of_layer(1), "cls_bias", untied.scale)
    q, k, _ = random_qkv()
    weights = torch.softmax(q @ k.transpose(2, 3), -1)
    (bias, gate), (tied_bias, tied_gate) = untied.terms(L)[1], tied.terms(L)[1]

    torch.testing.assert_close(bias[:, 0], theta[0][:, None].expand(H, L), check_dtype=False)  # [CLS] to [CLS] included
    torch.testing.assert_close(bias[:, 1:, 0], theta[1][:, None].expand(H, L - 1), check_dtype=False)
    rest = 0 if tied_bias is None else tied_bias[:, 1:, 1:]
    torch.testing.assert_close(bias[:, 1:, 1:], rest + torch.zeros(H, L - 1, L - 1), check_dtype=False)

    for ours, theirs, neutral in [
        (untied.content(q, k, 1), tied.content(q, k, 1), 0.0), (gate, tied_gate, 1.0)
    ]:  # fmt: skip
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours[..., 0, :] == neutral).all() and (ours[..., :, 0] == neutral).all()
            torch.testing.assert_close(ours[..., 1:, 1:], theirs[..., 1:, 1:])
    if (value := untied.value(weights, 1)) is not None:
        off_cls = weights.clone()
        off_cls[..., 0, :] = off_cls[..., :, 0] = 0
        torch.testing.assert_close(value, tied.value(off_cls, 1))


def encoder(position, cls="tied", **options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "attention_dropout": 0.0, "layers": 2, "width": 16, "ffn": 32, "heads": 2, **options}
    return Encoder(40, PAD, max_positions=16, position=position, cls=cls, **options).double()


def tokens(length=L, batch=B):
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_theta1_matters_only_without_a_denominator(normaliser):
    """A constant added to one whole row of logits cancels in softmax and l2, in outputs and gradients; elsewhere it
    does not."""
    model = scramble(encoder("alibi", "untied", normaliser=normaliser))
    before, _ = model(tokens())
    before.square().sum().backward()
    with torch.no_grad():
        model.positions.theta[0] += 0.7
    after, _ = model(tokens())
    cancels = normaliser in ("softmax", "l2")
    assert ((before - after).abs().max() < 1e-6) == cancels
    assert (model.positions.theta.grad[0].abs().max() < 1e-6) == cancels
    assert model.positions.theta.grad[1].abs().max() > 1e-6


# ---- properties of the whole registry ----

SETTINGS = [(n, "tied") for n in SCHEMES] + [(n, "untied") for n in UNTIEABLE] + [(n, "tied") for n in COMBINATIONS]
SETTINGS += [("untied+t5", "untied"), ("absolute+t5", "tied")]
everywhere = pytest.mark.parametrize(("position", "cls"), SETTINGS, ids=lambda x: x)


def refused(position):
    try:
        Positions(position, DIMS)
    except ValueError:
        return True


PER_LAYER = [(f"{name}:layer", "tied") for name in SCHEMES if not refused(f"{name}:layer")]


@pytest.mark.parametrize(("position", "cls"), [*SETTINGS, *PER_LAYER])
def test_every_parameter_learns(position, cls):
    model = scramble(encoder(position, cls))
    out, _ = model(tokens())
    generator = torch.Generator().manual_seed(2)
    (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum().backward()
    silent = set()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if p.grad.abs().max() < 1e-6:
            silent.add(name)
    # A bias of the keys adds a constant to each row of logits, which softmax does not see; [CLS] untied, the row is no
    # longer whole.
    keyed = {"untied", "untied:layer", "absolute_d", "absolute_d:layer"} & set(position.split("+"))
    copies = [f"{name[:-6]}.{i}" for name in keyed for i in range(2) if name.endswith(":layer")]
    whole = [name for name in keyed if not name.endswith(":layer")]
    assert silent == ({f"positions.{name}.k.bias" for name in copies + whole} if cls == "tied" else set())


@pytest.mark.parametrize(
    ("position", "cls", "layer", "normaliser"),
    [(position, cls, "transformer", "softmax") for position, cls in SETTINGS]
    + [(*s, layer, norm) for s in [("nopos", "tied"), ("urpe", "untied")] for layer in LAYERS for norm in NORMALISERS],
)
def test_padding_changes_nothing(position, cls, layer, normaliser):
    model = scramble(encoder(position, cls, layer=layer, normaliser=normaliser)).eval()
    padded = tokens()
    padded[1, 6:] = PAD
    both, _ = model(padded)
    alone, _ = model(padded[1:, :6])
    other = padded.clone()
    other[0] = other[0].flip(0)
    torch.testing.assert_close(both[1, :6], alone[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(other)[0][1], both[1], rtol=1e-9, atol=1e-9)  # nor do the other rows of the batch


@pytest.mark.parametrize("position", [*SCHEMES, *COMBINATIONS])
def test_only_nopos_ignores_order(position):
    model = scramble(encoder(position)).eval()
    x, order = tokens(), torch.randperm(L, generator=torch.Generator().manual_seed(3))
    difference = (model(x)[0][:, order] - model(x[:, order])[0]).abs().max()
    assert difference < 1e-12 if position == "nopos" else difference > 1e-6


@everywhere
def test_state_dict_round_trip_and_contradiction(position, cls):
    model = scramble(encoder(position, cls)).eval()
    copy = encoder(position, cls).eval()
    copy.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy(tokens())[0], model(tokens())[0], rtol=0, atol=0)
    other = "alibi" if position != "alibi" else "rope"  # neither has parameters
    with pytest.raises((ValueError, RuntimeError), match="position=" + re.escape(model.positions.name)):
        encoder(other).load_state_dict(model.state_dict(), strict=False)


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_in_half_precision(position, cls, dtype):
    model = encoder(position, cls).to(dtype)
    padded = tokens()
    padded[1, 6:] = PAD
    out, _ = model(padded)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not list(kind(DIMS).parameters())])
def test_half_precision_does_not_round_what_is_fixed(name):
    """fairseq's --fp16 calls `half()` on the model: sines and slopes stay what a float32 model computes."""
    dims = Dims(max_positions=512, width=768, heads=12, layers=1, head_dim=64, value_dim=64)
    whole, half = SCHEMES[name](dims), SCHEMES[name](dims).half()
    q, k = torch.randn(2, 1, 12, 512, 64, generator=torch.Generator().manual_seed(0))
    for hook, inputs in {"embed": (512,), "bias": (512, 1.0), "content": (q, k, 0)}.items():
        exact = getattr(whole, hook)(*inputs)
        assert exact is None or torch.equal(getattr(half, hook)(*inputs), exact)


@everywhere
def test_position_terms_are_computed_once_per_forward(position, cls, monkeypatch):
    model = encoder(position, cls, layers=3)
    calls = []
    for name, module in model.positions.items():
        for scheme in module if isinstance(module, torch.nn.ModuleList) else [module]:
            for hook in ("bias", "gate", "embed"):
                original = getattr(scheme, hook)
                monkeypatch.setattr(
                    scheme, hook, lambda *a, name=name, hook=hook, f=original: calls.append((name, hook)) or f(*a)
                )
    model(tokens())
    for name, module in model.positions.items():
        copies = len(module) if isinstance(module, torch.nn.ModuleList) else 1
        assert calls.count((name, "bias")) == calls.count((name, "gate")) == copies
        assert calls.count((name, "embed")) == 1
    terms = model.terms(tokens())
    assert all((t is terms[0]) != model.positions.per_layer for t in terms[1:])  # shared: one object for all layers


@everywhere
def test_position_terms_stay_accurate_under_autocast(position, cls):
    """float32 whatever the precision around them: within 1e-5 of the float64 logits, where bfloat16 would be off by
    1e-2."""
    model = scramble(encoder(position, cls))
    exact = model.positions.terms(L)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.float().positions.terms(L)[0]
    for a, b in zip(exact, rounded, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert b.dtype == torch.float32
            torch.testing.assert_close(b.double(), a.double(), atol=1e-5, rtol=1e-5)


# ---- errors ----


@pytest.mark.parametrize(
    ("names", "cls", "message"),
    [
        ("untyed", "tied", "valid, joined by '\\+': absolute, "),
        ("untied+untied", "tied", "repeated"),
        ("untied:head", "tied", "unknown suffix 'head'"),
        ("untied", "maybe", "'tied' or 'untied'"),
        ("nopos+t5", "tied", "cannot be combined"),
        ("rope+rope_values", "tied", "both rotate"),
        ("absolute:layer", "tied", "cannot be per layer"),
        ("nopos:layer", "tied", "nopos has no parameters; it cannot be per layer"),
        ("t5+alibi:layer", "tied", "alibi has no parameters; it cannot be per layer"),
        ("shaw_sinusoidal:layer", "tied", "shaw_sinusoidal has no parameters; it cannot be per layer"),
        ("deberta:layer", "tied", "deberta has projections of its own in every layer already"),
        ("absolute", "untied", "attention has no position term"),
        ("nopos", "untied", "attention has no position term"),
        ("rope+t5", "untied", "no term to drop"),
    ],
)
def test_refusals_give_the_reason(names, cls, message):
    with pytest.raises(ValueError, match=message):
        Positions(names, DIMS, cls)


def test_too_long_a_sequence_names_length_and_limit():
    with pytest.raises(ValueError, match="17 tokens exceeds the limit of 16"):
        encoder("untied")(tokens(17))


def test_order_of_names_does_not_matter():
    assert Positions("t5+untied", DIMS).name == Positions("untied+t5", DIMS).name == "untied+t5"


def test_unknown_layer_and_normaliser():
    with pytest.raises(ValueError, match="valid: softmax, l2"):
        encoder("untied", normaliser="softmin")
    with pytest.raises(ValueError, match="valid: transformer, gau"):
        encoder("untied", layer="rnn")


def test_sizes_without_meaning():
    with pytest.raises(ValueError, match="width 16 is not a multiple of the number of heads 3"):
        encoder("untied", heads=3)
    encoder("untied", heads=3, layer="gau")  # has one head
    with pytest.raises(ValueError, match="activation_dropout=0.1 has no meaning"):
        encoder("untied", layer="gau", activation_dropout=0.1)
