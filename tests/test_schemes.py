"""Every scheme, with and without its options, against its paper's formula, written as naive float64 loops.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import scramble
from test_positions import COMBINATIONS

from tupe.attention import Plain, Prepared, attend, mask_logits
from tupe.encoder import Encoder, init_bert
from tupe.positions import Dims, LayerContext, Positions, options_of, overrides, parse
from tupe.schemes import SCHEMES, skew, toeplitz, unskew
from tupe.token_positions import TokenPositions

B, L, H, D = 2, 9, 2, 4
DIMS = Dims(max_positions=16, width=H * D, heads=H, layers=3, head_dim=D, value_dim=6)


# ---- formulas ----


class Formula:
    """A scheme as functions of single positions i (query) and j (key); the defaults are 'no such term'. s is the
    scheme, whose parameters are read, o its options as the name has them."""

    def __init__(self, s, o):
        self.s, self.o = s, o

    def read(self, h, q, k, x):
        """A sequence, before its single positions: q and k [L, D] of head h, and the layer's input [L, C]."""

    def embed(self, i):
        return 0.0

    def bias(self, h, i, j, scale):
        return 0.0

    def factor(self, h):
        return 1.0

    def content(self, h, i, j, q, k, layer):
        return 0.0

    def gate(self, h, i, j):
        return 1.0

    def value(self, i, j):
        return 0.0

    def sees(self, i, j, layer):
        return True

    def theta(self, h, which, scale):
        """The logit from [CLS] (which = 0) or to [CLS] (1) where it is untied."""
        return 0.0

    def rotate_qk(self, x, i):
        return x

    def rotate_v(self, x, i):
        return x


def clip(offset, t=3):
    return max(-t, min(t, offset))


def short(names):
    """The same with offsets clipped within the L of these tests, where they are clipped, unless a name says how; and
    a window that is smaller than L."""

    def clipped(part):
        if part == "window":
            return "window:size:4"
        limited = "max_distance" in part or part.partition(":")[0] not in CLIPPED
        return part if limited else f"{part}:max_distance:3"

    return "+".join(map(clipped, names.split("+")))


CLIPPED = ("clipped", "factored", "shaw", "shaw_sinusoidal", "shaw_sinusoidal_learned", "shaw_values", "deberta",
           "deberta_shared", "urpe")  # fmt: skip


def head(x, h):
    return x[h * D : (h + 1) * D]


def wave(omega, position):
    return torch.stack([f(position * w) for w in omega for f in (torch.sin, torch.cos)])


def vaswani(width, base=10000):
    return torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)


def layer_norm(x, norm):
    x = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + norm.eps)
    return x * norm.weight + norm.bias


def learned(scheme):
    return scheme.log_omega.double().exp()


class AbsoluteFormula(Formula):
    def embed(self, i):
        row = self.s.table.weight[i]
        return layer_norm(row, self.s.norm) if self.o.get("norm") else row


class SinusoidalFormula(Formula):
    def embed(self, i):
        return self.o.get("amplitude", 0.02) * wave(vaswani(H * D), i)


class SinusoidalLearnedFormula(Formula):
    def embed(self, i):
        return self.o.get("amplitude", 0.02) * wave(learned(self.s), i)


class UntiedFormula(Formula):
    def p(self, i):
        """Position i; -1 is theta1, and theta2 shares [CLS]'s own row, 0."""
        row = self.s.table.weight[i + 1]
        return layer_norm(row, self.s.norm) if self.o.get("norm", True) else row

    def q(self, h, i):
        return head(self.s.q.weight @ self.p(i) + self.s.q.bias, h)

    def k(self, h, i):
        return head(self.s.k.weight @ self.p(i) + self.s.k.bias, h)

    def bias(self, h, i, j, scale):
        return scale * self.q(h, i) @ self.k(h, j)

    def theta(self, h, which, scale):
        return self.bias(h, which - 1, which - 1, scale)


class AbsoluteDFormula(UntiedFormula):
    def content(self, h, i, j, q, k, layer):
        return q @ self.k(h, j) + self.q(h, i) @ k


class T5Formula(Formula):
    firsts = [8, 12, 16, 23, 32, 46, 64, 91]  # smallest distance of buckets 8 .. 15: ceil(8 * 16^(n/8))

    def bucket(self, offset):
        """Of 32 with max_distance 128; `firsts` of another class for other options."""
        distance, exact = abs(offset), self.firsts[0]
        index = distance if distance < exact else exact - 1 + sum(distance >= first for first in self.firsts)
        return index + (2 * exact if offset > 0 else 0)

    def logit(self, row, h):
        return self.o.get("multiplier", 1) * self.s.table.weight[row, h]

    def bias(self, h, i, j, scale):
        return self.logit(self.bucket(j - i), h)

    def theta(self, h, which, scale):
        half = 2 * self.firsts[0]
        return self.logit((half, 2 * half)[which], h)


class SmallT5Formula(T5Formula):
    firsts = [2, 4]  # buckets 8, max_distance 8: 2 * 4^(n/2)


class ClippedFormula(Formula):
    def bias(self, h, i, j, scale):
        t = self.o["max_distance"]
        return self.s.table.weight[clip(j - i, t) + t, h]


class NonParametricFormula(Formula):
    def bias(self, h, i, j, scale):
        return self.s.table[h, i, j]


class FactoredFormula(Formula):
    def bias(self, h, i, j, scale):
        t = self.o["max_distance"]
        r = self.s.table.weight[clip(j - i, t) + t]
        return scale * head(self.s.q.weight @ r, h) @ head(self.s.k.weight @ r, h)


class AlibiFormula(Formula):
    """H = 2: the slopes of 2 heads are 1/16 and 1/256, of 4 heads 1/4, 1/16, 1/64, 1/256."""

    def slope(self, h, right):
        if self.o.get("learned"):
            return self.s.log_slopes[right if self.o.get("sides") else 0, h].double().exp()
        if self.o.get("sides"):
            return [[1 / 4, 1 / 16], [1 / 64, 1 / 256]][h][right]
        return [1 / 16, 1 / 256][h]

    def bias(self, h, i, j, scale):
        return -self.slope(h, int(j > i)) * abs(i - j)


class DirectionsFormula(Formula):
    def bias(self, h, i, j, scale):
        return -1e9 if (j > i if h < H / 2 else j < i) else 0.0


class KerpleFormula(Formula):
    def bias(self, h, i, j, scale):
        side = int(j > i) if self.o.get("sides") else 0
        a, inner, d = self.s.log_factor[side, h].double().exp(), self.s.inner[side, h].double(), abs(i - j)
        if self.o.get("power"):
            return -a * d ** (2 / (1 + math.exp(-inner)))
        return -a * math.log(1 + math.exp(inner) * d)


class FireFormula(Formula):
    def bias(self, h, i, j, scale):
        side = int(j > i) if self.o.get("sides") else 0
        c, threshold = (x[side].double().exp().item() for x in (self.s.log_c, self.s.log_threshold))
        x = math.log(1 + c * abs(i - j)) / math.log(1 + c * max(threshold, i, j))
        units = zip(*self.s.hidden[side].tolist(), self.s.out[side, h].tolist(), strict=True)
        return sum(out * max(0, weight * x + bias) for weight, bias, out in units)


class ContinuousBiasFormula(Formula):
    def bias(self, h, i, j, scale):
        x = math.copysign(math.log(1 + abs(j - i)), j - i)
        units = zip(self.s.hidden.weight[:, 0].tolist(), self.s.hidden.bias.tolist(), self.s.out.weight[h].tolist(),
                    strict=True)  # fmt: skip
        logit = sum(out * max(0, weight * x + bias) for weight, bias, out in units)
        return 16 / (1 + math.exp(-logit)) - 8


class ShawFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        t = self.o["max_distance"]
        return q @ self.s.table.weight[clip(j - i, t) + t]


class ShawSinusoidalFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        return self.o.get("amplitude", 1) * q @ wave(vaswani(D), clip(j - i, self.o["max_distance"]))


class ShawSinusoidalLearnedFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        return self.o.get("amplitude", 1) * q @ wave(learned(self.s), clip(j - i, self.o["max_distance"]))


class ShawValuesFormula(Formula):
    def value(self, i, j):
        t = self.o["max_distance"]
        return self.s.table.weight[clip(j - i, t) + t]


class DebertaFormula(Formula):
    def delta(self, i, j):
        t = self.o["max_distance"]
        return max(0, min(2 * t - 1, i - j + t))

    def content(self, h, i, j, q, k, layer):
        layer = layer if len(self.s.q) > 1 else 0
        table, w_q, w_k = self.s.table.weight, self.s.q[layer].weight, self.s.k[layer].weight
        return q @ head(w_k @ table[self.delta(i, j)], h) + k @ head(w_q @ table[self.delta(j, i)], h)


W_Q, W_K = torch.randn(2, H * D, H * D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def project(rows):
    """Projections of a layer: [1, R, C] -> q, k, v [1, H, R, D]."""
    return [(rows @ w.to(rows.dtype).T).unflatten(2, (H, D)).transpose(1, 2) for w in (W_Q, W_K, W_Q)]


class DebertaV2Formula(Formula):
    firsts = [129]  # smallest distances that share a bucket with others: none within L

    def row(self, i, j):
        distance, middle = abs(i - j), self.firsts[0] - 1
        bucket = distance if distance <= middle else middle + sum(distance >= first for first in self.firsts)
        return layer_norm(self.s.table.weight[(self.s.buckets - 1) + (bucket if i > j else -bucket)], self.s.norm)

    def content(self, h, i, j, q, k, layer):
        return q @ head(W_K @ self.row(i, j), h) + k @ head(W_Q @ self.row(i, j), h)


class SmallDebertaV2Formula(DebertaV2Formula):
    # 6 buckets, max_distance 8: 3 + ceil(2 log(d / 3) / log(7 / 3)) is 4 for d = 4, 5 from 5 on
    firsts = [4, 5]


class TransformerXLFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        r = head(self.s.r[layer].weight @ wave(vaswani(H * D), i - j), h)
        return q @ r + self.s.u[h] @ k + self.s.v[h] @ r


class RopeFormula(Formula):
    def read(self, h, q, k, x):
        self.h = h

    def rotate_qk(self, x, i):
        """The first columns of x as complex numbers times e^{i theta}."""
        columns = 2 * round(len(x) * self.o.get("fraction", 1) / 2)
        base = self.o.get("base", 10000)
        if self.o.get("local") and self.layer % self.o.get("every", 3) == 0:
            return x
        longer = self.o
        if "local_base" in self.o and self.layer % self.o.get("every", 3):
            base, longer = self.o["local_base"], {}
        if "ntk" in longer:
            base *= longer["ntk"] ** (columns / (columns - 2))
        omega = learned(self.s) if self.o.get("learned") else vaswani(columns, base)
        omega, yarn = omega / longer.get("interpolate", 1), longer.get("yarn", 1)
        omega[1:] /= yarn  # the ramp of so few columns keeps the first pair, divides the second
        turned = torch.view_as_complex(x[:columns].unflatten(0, (-1, 2)).contiguous()) * torch.exp(1j * i * omega)
        return torch.cat([torch.view_as_real(turned).flatten(), x[columns:]]) * (0.1 * math.log(yarn) + 1)


class RopeValuesFormula(RopeFormula):
    def rotate_v(self, x, i):
        return self.rotate_qk(x, i)


class UrpeFormula(Formula):
    def gate(self, h, i, j):
        t = self.o["max_distance"]
        return self.s.table[h, clip(j - i, t) + t]


class WindowFormula(Formula):
    def sees(self, i, j, layer):
        every = self.o.get("every", 3)
        is_global = every and layer in range(0, 99, int(every))
        return is_global or 2 * abs(i - j) <= self.o["size"]


def softplus(x):
    return math.log(1 + math.exp(x))


class FopeFormula(Formula):
    def read(self, h, q, k, x):
        self.h = h

    def rotate_qk(self, x, i):
        omega = vaswani(D, self.o.get("base", 10000)).tolist()
        out = x.clone()
        for m, column in enumerate(omega):
            if column * DIMS.max_positions < 2 * math.pi:
                continue
            seen = [(f, w) for f, w in enumerate(omega) if w * DIMS.max_positions >= 2 * math.pi]
            cos, sin = (
                sum(self.s.mixtures[part, self.h, f, m].double() * wave(i * w) for f, w in seen)
                for part, wave in enumerate((math.cos, math.sin))
            )
            even, odd = x[2 * m], x[2 * m + 1]
            out[2 * m], out[2 * m + 1] = even * cos - odd * sin, odd * cos + even * sin
        return out


class PopeFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        """The sum over columns in place of the product of words."""
        total, base = -q @ k, self.o.get("base", 10000)
        for c in range(D):
            angle = base ** (-c / D) * (j - i) + min(0, max(-2 * math.pi, self.s.delta[h, c].item()))
            total += softplus(q[c].item()) * softplus(k[c].item()) * math.cos(angle)
        return total


class SelectiveRopeFormula(Formula):
    def read(self, h, q, k, x):
        up, down = (part[self.layer].weight.double() for part in (self.s.up, self.s.down))
        self.phi = [up.unflatten(0, (H, -1))[h] @ (down @ row) for row in x]

    def rotate_qk(self, x, i):
        angle = sum(self.phi[: i + 1]) * vaswani(D, self.o.get("base", 500000))
        turned = torch.view_as_complex(x.unflatten(0, (-1, 2)).contiguous()) * torch.exp(1j * angle)
        return torch.view_as_real(turned).flatten()


class LogLengthFormula(Formula):
    def factor(self, h):
        return 1 if self.layer % self.o.get("every", 1) else self.s.scale[self.layer, h].double() * math.log(L)


class WaveletsFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        scales, total = int(self.o.get("scales", 8)), 0
        for c in range(D):
            shift = c // scales - ((D - 1) // scales) / 2
            t = (j - i - shift) / 2 ** (c % scales)
            total += q[c] * (1 - t * t) * math.exp(-t * t / 2)
        return total


class CopeFormula(Formula):
    def read(self, h, q, k, x):
        self.k = k

    def content(self, h, i, j, q, k, layer):
        between = range(min(i, j), max(i, j) + 1)
        p = sum(torch.sigmoid(q @ self.k[m] / math.sqrt(D)).item() for m in between)
        p = min(p, self.o.get("positions", 64) - 1)
        below, above = (q @ self.s.table[int(j > i), round(end(p))] for end in (math.floor, math.ceil))
        return below + (p - math.floor(p)) * (above - below)


class CableFormula(Formula):
    def read(self, h, q, k, x):
        linear = self.s.project[self.layer]
        self.steps = [softplus((linear.weight[h] @ token + linear.bias[h]).item()) for token in x]

    def content(self, h, i, j, q, k, layer):
        return -sum(self.steps[min(i, j) + 1 : max(i, j) + 1]) * math.sqrt(D)


class GrapeAFormula(Formula):
    def content(self, h, i, j, q, k, layer):
        u = self.s.direction[h].double()
        gate = softplus((u / u.norm() @ k / math.sqrt(D)).item())
        return -abs(i - j) * [1 / 16, 1 / 256][h] * softplus(self.s.omega[h].item()) * gate * math.sqrt(D)


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
    "kerple": KerpleFormula,
    "fire": FireFormula,
    "cpb": ContinuousBiasFormula,
    "shaw": ShawFormula,
    "shaw_sinusoidal": ShawSinusoidalFormula,
    "shaw_sinusoidal_learned": ShawSinusoidalLearnedFormula,
    "shaw_values": ShawValuesFormula,
    "deberta": DebertaFormula,
    "deberta_shared": DebertaFormula,
    "deberta_v2": DebertaV2Formula,
    "transformer_xl": TransformerXLFormula,
    "rope": RopeFormula,
    "rope_values": RopeValuesFormula,
    "urpe": UrpeFormula,
    "window": WindowFormula,
    "fope": FopeFormula,
    "selective_rope": SelectiveRopeFormula,
    "log_length": LogLengthFormula,
    "wavelets": WaveletsFormula,
    "cope": CopeFormula,
    "cable": CableFormula,
    "grape_a": GrapeAFormula,
    "directions": DirectionsFormula,
    "pope": PopeFormula,
}
SMALL = {"buckets:8": SmallT5Formula, "buckets:6": SmallDebertaV2Formula}
EXTRA_TERMS = {"untied": 1, "absolute_d": 3, "deberta": 2, "deberta_shared": 2, "deberta_v2": 2}


def naive_attention(formulas, q, k, v, x, scale, layer):
    """Softmax attention of one sequence as nested loops over the formulas of all schemes. q, k, v: [H, L, D or E]; x:
    the layer's input [L, C]."""
    out = torch.zeros_like(v)
    for h in range(H):
        for f in formulas:
            f.read(h, q[h], k[h], x)
        for i in range(L):
            logits, values, gates = [], [], []
            for j in range(L):
                q_i, k_j, v_j = q[h, i], k[h, j], v[h, j]
                content = sum(f.content(h, i, j, q_i, k_j, layer) for f in formulas)
                bias = sum(f.bias(h, i, j, scale) for f in formulas)
                if not all(f.sees(i, j, layer) for f in formulas):
                    bias = torch.tensor(-math.inf, dtype=torch.float64)
                for f in formulas:
                    q_i, k_j, v_j = f.rotate_qk(q_i, i), f.rotate_qk(k_j, j), f.rotate_v(v_j, j)
                q_i = q_i * math.prod(f.factor(h) for f in formulas)
                logits.append((q_i @ k_j + content) * scale + bias)
                values.append((v_j, sum(f.value(i, j) for f in formulas)))
                gates.append(math.prod(f.gate(h, i, j) for f in formulas))
            weights = torch.softmax(torch.stack(logits), 0)
            for weight, gate, (v_j, extra) in zip(weights, gates, values, strict=True):
                for f in formulas:
                    v_j = f.rotate_v(v_j, -i)
                out[h, i] += weight * gate * (v_j + extra)
    return out


def random_qkv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, L, D), (B, H, L, D), (B, H, L, DIMS.value_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


OPTIONS = [  # every option of every family
    "absolute:std:0.06", "absolute:norm:True:gain:0.1", "sinusoidal:amplitude:0.1", "sinusoidal_learned:amplitude:0.1",
    "untied:norm:False:std:1", "absolute_d:norm:False", "t5:multiplier:25", "t5:buckets:8:max_distance:8",
    "untied+nonparametric", "untied+factored:max_distance:2:std:0.1", "shaw:layer:max_distance:2",
    "shaw_sinusoidal:max_distance:4:amplitude:0.03",
    "shaw_sinusoidal_learned:amplitude:0.03", "shaw+shaw_values:max_distance:5", "deberta:max_distance:4",
    "rope:fraction:0.5", "rope:base:100:fraction:0.5:learned:True", "rope:base:500:local_base:100:every:2",
    "rope:base:500:local_base:100:interpolate:4", "rope:local_base:100:yarn:4+window", "rope:local_base:100:ntk:4",
    "rope:learned:True:interpolate:4", "rope:ntk:4", "rope:yarn:4", "rope_values:base:100:fraction:0.5",
    "urpe:layer:max_distance:2", "alibi:sides:True",
    "alibi:sides:True:learned:True", "kerple:power:True", "kerple:sides:True", "kerple:layer",
    "fire:threshold:4:width:8", "fire:threshold:4:sides:True", "cpb:width:8", "deberta_v2:buckets:6:max_distance:8",
    "deberta_v2:layer", "fope:base:100:std:0.3", "selective_rope:base:100:rank:3",
    "rope:local:True:every:2", "rope+log_length:every:2", "wavelets:scales:2",
    "cope:positions:3", "cope:layer", "grape_a:layer",
    "rope:local:True+log_length:every:3+window", "rope:layer:learned:True:fraction:0.5", "rope+directions",
    "pope:base:100", "pope:layer", "pope+t5", "window:size:3:every:2", "untied+t5+window:size:4:every:0",
    "rope:local_base:100+window:size:6", "shaw+urpe+window",
]  # fmt: skip


def formulas_of(names, positions, layer):
    """The formulas of all schemes; options are read from the name with means of their own, not with `parse`."""

    def read(word):
        return {"True": True, "False": False}[word] if word in ("True", "False") else float(word)

    formulas, order = [], list(SCHEMES)
    parts = sorted(names.split("+"), key=lambda part: order.index(part.partition(":")[0]))
    for part, scheme in zip(parts, positions.of_layer(layer), strict=True):
        name, *words = part.replace(":layer", "").split(":")
        options = {key: read(word) for key, word in zip(words[::2], words[1::2], strict=True)}
        if "max_distance" in options:
            options["max_distance"] = int(options["max_distance"])
        assert name in FORMULAS, f"{name} has no formula: write a subclass of Formula, and put it into FORMULAS"
        formula = SMALL.get(":".join(words[:2]), FORMULAS[name])
        formulas.append(formula(scheme, options))
        formulas[-1].layer = layer
    return formulas


INPUT = torch.randn(B, L, H * D, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def in_layer(positions, index):
    return LayerContext(index, positions.token_positions(L), project, lambda: INPUT, scale=positions.scale)


# The last of three layers, and of what layers have their own of, or take turns with, the first.
BY_LAYER = ("layer", "every", "local", "window", "deberta", "transformer_xl", "selective_rope", "log_length", "cable")
CASES = [(names, layer) for names in [*SCHEMES, *COMBINATIONS, *OPTIONS] for layer in (0, 2)
         if layer == 2 or any(word in names for word in BY_LAYER)]  # fmt: skip


@pytest.mark.parametrize("names, layer", CASES)
def test_formula(names, layer):
    """Of the second sequence of a batch of two, which differ."""
    names = short(names)
    positions = scramble(Positions(names, DIMS).double())
    formulas = formulas_of(names, positions, layer)
    parts = [name.partition(":")[0] for name in names.split("+")]
    q, k, v = random_qkv()
    scale = 1 / math.sqrt((1 + sum(EXTRA_TERMS.get(name, 0) for name in parts)) * D)

    embed = positions.embed(L)
    for i in range(L):
        expected = sum(f.embed(i) for f in formulas)
        torch.testing.assert_close(torch.zeros(H * D) if embed is None else embed[i], expected + torch.zeros(H * D),
                                   check_dtype=False, atol=2e-6, rtol=1e-5)  # fmt: skip
    bias, gate = positions.terms(L)[layer]
    if (reach := positions.reach(in_layer(positions, layer))) is not None:
        bias = mask_logits(bias, positions.token_positions(L).near(reach))
    ours = attend(q, k, v, positions, Prepared(bias, gate), in_layer(positions, layer), Plain())
    # content-free terms are float32 by contract (position terms in double would hide what training uses)
    expected = naive_attention(formulas, q[1], k[1], v[1], INPUT[1], scale, layer)
    torch.testing.assert_close(ours[1], expected, atol=5e-6, rtol=1e-5)


def test_every_shipped_scheme_has_a_formula_and_every_option_a_case():
    assert set(FORMULAS) == set(SCHEMES)
    tried = {(part.name, option) for names in OPTIONS for part in parse(names) for option in part.options}
    tried |= {(name, "max_distance") for name in CLIPPED}
    missing = {(name, option) for name, kind in SCHEMES.items() for option in options_of(kind)} - tried
    missing -= {("absolute_d", "std")}  # which changes initial values alone: see below
    assert not missing, f"options without a case: add one of each, such as `t5:buckets:8`, to OPTIONS: {missing}"


COUNTING = "cope", "cable", "selective_rope", "log_length"  # count tokens, wherever these stand


@pytest.mark.parametrize("name", COUNTING)
def test_tokens_are_counted_without_padding(name):
    """Among padding, tokens meet each other as they do without it; positions that are drawn change nothing."""
    real = torch.tensor([0, 1, 3, 4, 7])
    mask = torch.zeros(B, L, dtype=torch.bool)
    mask[:, real] = True
    positions = scramble(Positions(name, DIMS).double())
    drawn = TokenPositions(5, drawn=torch.tensor([0, 2, 3, 5, 9]), span=16)
    whole = LayerContext(1, positions.token_positions(L), project, lambda: INPUT, mask)
    part = LayerContext(1, drawn, project, lambda: INPUT[:, real])
    q, k, v = random_qkv()
    some = [x[:, :, real] for x in (q, k, v)]
    if overrides(SCHEMES[name], "content"):
        ours, theirs = positions.content(*some[:2], part), positions.content(q, k, whole)
        torch.testing.assert_close(ours, theirs[:, :, real[:, None], real], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(positions.rotate(*some, part), positions.rotate(q, k, v, whole), strict=True):
        torch.testing.assert_close(ours, theirs[:, :, real], atol=1e-5, rtol=1e-5)  # projections are float32


@pytest.mark.parametrize(
    "names", [*(name for name in SCHEMES if name not in COUNTING), "untied+t5", "fire:threshold:4:sides:True"]
)
def test_other_positions(names):
    """Tokens at 0, 3, 4 and 9 meet each other as the tokens 0, 3, 4 and 9 of a longer sequence do."""
    names, at = short(names), torch.tensor([0, 3, 4, 9])
    positions = scramble(Positions(names, DIMS).double())
    whole, part = positions.token_positions(10), TokenPositions(4, drawn=at, span=16)
    q, k, v = (torch.randn(B, H, 10, width, dtype=torch.float64) for width in (D, D, DIMS.value_dim))
    of_whole, of_part = LayerContext(1, whole, project), LayerContext(1, part, project)
    some = [x[:, :, at] for x in (q, k, v)]

    def same(ours, theirs, *indices):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs[indices], atol=1e-6, rtol=1e-6)

    every, pairs = slice(None), (at[:, None], at)
    assert torch.equal(part.near(5), whole.near(5)[pairs])
    same(positions.embed(part), positions.embed(whole), at)
    for ours, theirs in zip(positions.terms(part)[1], positions.terms(whole)[1], strict=True):
        same(ours, theirs, every, *pairs)
    same(positions.content(*some[:2], of_part), positions.content(q, k, of_whole), every, every, *pairs)
    for ours, theirs in zip(positions.rotate(*some, of_part), positions.rotate(q, k, v, of_whole), strict=True):
        same(ours, theirs, every, every, at)
    same(positions.unrotate(some[2], of_part), positions.unrotate(v, of_whole), every, every, at)
    weights = torch.zeros(B, H, 10, 10, dtype=torch.float64)
    weights[:, :, at[:, None], at] = torch.rand(B, H, 4, 4, dtype=torch.float64)
    same(positions.value(weights[:, :, at[:, None], at], of_part), positions.value(weights, of_whole), every, every, at)


def test_t5_buckets_equal_hugging_face():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-600, 601)
    for buckets, longest in [(32, 128), (64, 256), (8, 8)]:
        ours = SCHEMES["t5"](DIMS, buckets=buckets, max_distance=longest).bucket_of(offsets)
        theirs = t5.T5Attention._relative_position_bucket(offsets, True, buckets, longest)
        assert torch.equal(ours, theirs)


def test_deberta_v2_buckets_equal_hugging_face():
    deberta_v2 = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    offsets = torch.arange(-511, 512)
    # ... (32, 25) and after it: rounding of the logarithm goes beyond the last bucket
    for buckets, longest in [(256, 512), (32, 512), (6, 8), (32, 25), (32, 91), (256, 300)]:
        scheme = SCHEMES["deberta_v2"](DIMS, buckets=buckets, max_distance=longest)
        ours = scheme.bucket_of(offsets)
        theirs = deberta_v2.make_log_bucket_position(offsets.clamp(1 - longest, longest - 1), buckets, longest)
        theirs = theirs.clamp(1 - buckets, buckets - 1)  # theirs are clamped where they choose rows
        assert torch.equal(ours, theirs.long()) and ours.max() == -ours.min() == buckets - 1
        assert len(scheme.table.weight) == 2 * buckets - 1


@pytest.mark.parametrize("options", ["", ":base:100:std:0.3"])
def test_the_mixtures_of_fope_are_shares(options):
    """They sum to 1 over the frequencies that are kept, so that the cosine at position 0 is 1, as the authors' code."""
    (scheme,) = Positions(f"fope{options}", DIMS).values()
    kept = scheme.kept(torch.tensor(vaswani(D, scheme.base)))
    assert 0 < kept.sum() < len(kept) or "base" not in options
    torch.testing.assert_close(scheme.mixtures[..., kept, :].sum(-2)[..., kept], torch.ones(2, H, int(kept.sum())))


def test_sums_over_tokens_are_float32_under_autocast():
    """A sum in bfloat16 stands still: 512 + 1 = 512. With steps of 1, offsets and RoPE are the oracle."""
    long = 700
    x, (q, k, v) = torch.ones(1, long, DIMS.width), torch.randn(3, 1, H, long, D)
    layer = LayerContext(1, Positions("rope", DIMS).token_positions(long), project, lambda: x)
    cable, selective = SCHEMES["cable"](DIMS), SCHEMES["selective_rope"](DIMS, base=10000, rank=DIMS.width)
    with torch.no_grad():
        cable.project[1].weight.zero_()
        cable.project[1].bias.fill_(math.log(math.e - 1))  # softplus of it is 1
        for linear in (selective.down[1], selective.up[1]):
            linear.weight.fill_(1 / DIMS.width)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, (ours_q, ours_k, _) = cable.content(q, k, layer), selective.rotate(q, k, v, layer)
    distances = -logits * layer.scale
    index = torch.arange(long)
    offsets = (index - index[:, None]).abs().float().expand_as(distances)
    torch.testing.assert_close(distances.float(), offsets, atol=0.1, rtol=0.01)
    theirs_q, theirs_k, _ = SCHEMES["rope"](DIMS).rotate(q, k, v, layer)
    ours, theirs = ours_q @ ours_k.transpose(2, 3), theirs_q @ theirs_k.transpose(2, 3)
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("name", ["yarn", "linear"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_frequencies_for_longer_sequences_equal_hugging_face(name, fraction):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.configuration_llama")
    options = {"rope_type": name, "factor": 8.0, "rope_theta": 10000.0, "partial_rotary_factor": fraction,
               "original_max_position_embeddings": 512}  # fmt: skip
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 512}
    config = llama.LlamaConfig(**sizes, rope_parameters=options)
    if not hasattr(utils, "RopeParameters"):  # transformers 4
        config.rope_scaling, config.partial_rotary_factor = options, fraction
    theirs, temperature = utils.ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))
    dims = Dims(max_positions=512, width=768, heads=12, layers=1, head_dim=64, value_dim=64)
    scheme = SCHEMES["rope"](dims, fraction=fraction, **{"interpolate" if name == "linear" else "yarn": 8.0})
    torch.testing.assert_close(scheme.frequencies(scheme.columns(64), torch.device("cpu")), theirs)
    q = torch.randn(1, 1, 1, 64)
    rotated, *_ = scheme.rotate(q, q, q, LayerContext(0, TokenPositions(1)))  # position 0: no rotation
    torch.testing.assert_close(rotated, q * temperature)


def test_yarn_stays_as_it_is_where_a_model_gets_more_positions():
    """Training further and `tupe checkpoint stretch` give the weights to a model with more positions."""
    short, longer = (Positions("rope:yarn:4", replace(DIMS, max_positions=n, head_dim=64)) for n in (128, 512))
    frequencies = [positions["rope"].frequencies(64, "cpu") for positions in (short, longer)]
    assert not torch.equal(*frequencies)
    longer.load_state_dict(short.state_dict())
    assert torch.equal(longer["rope"].frequencies(64, "cpu"), frequencies[0])


def test_initial_values_are_those_of_the_authors():
    """Ranges that tests of formulas, which read the parameters, do not see."""
    many = replace(DIMS, heads=4096)
    for power, largest_factor, largest_inner in ((False, 2, 1), (True, 1, 2)):
        kerple = SCHEMES["kerple"](many, power=power)
        factor = kerple.log_factor.exp()
        inner = 2 * kerple.inner.sigmoid() if power else kerple.inner.exp()
        for values, largest in ((factor, largest_factor), (inner, largest_inner)):
            assert 0.0099 < values.min() < 0.02 and 0.98 * largest < values.max() <= largest
            assert values.mean().item() == pytest.approx(largest / 2, rel=0.05)
    fire = SCHEMES["fire"](many)
    assert fire.log_c.exp().item() == pytest.approx(0.1) and fire.log_threshold.exp().item() == pytest.approx(512)
    xl = SCHEMES["transformer_xl"](many)
    assert xl.u.std().item() == pytest.approx(0.02, rel=0.05) and xl.v.std().item() == pytest.approx(0.02, rel=0.05)


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
NO_THETA = [n for n in UNTIEABLE if n not in ("untied", "absolute_d", "t5")]  # these keep vectors of theirs for [CLS]


@pytest.mark.parametrize("cls", ["untied", "zero"])
@pytest.mark.parametrize(
    "names",
    [*UNTIEABLE, "untied+t5", "shaw+shaw_values", "t5:layer+untied", "t5:multiplier:25", "untied:norm:False:std:1"],
)
def test_cls_reset(names, cls):
    """Logits from and to [CLS] are theta, which "zero" holds at 0, contents and values there 0, gates 1; everything
    else is as with [CLS] tied, which `test_formula` compares with the formulas."""
    names = short(names)
    tied, untied = (scramble(Positions(names, DIMS, choice).double()) for choice in ("tied", cls))
    tied.load_state_dict(untied.state_dict(), strict=False)
    formulas = formulas_of(names, untied, 1)
    if cls == "zero":
        theta = [[0.0] * H] * 2
        assert untied.state_dict().keys() == tied.state_dict().keys()  # no theta of its own
    elif all(part.partition(":")[0] in NO_THETA for part in names.split("+")):
        theta = untied.theta
    else:
        theta = [[sum(f.theta(h, which, untied.scale) for f in formulas) for h in range(H)] for which in (0, 1)]
    theta = torch.tensor(theta, dtype=torch.float32)
    q, k, _ = random_qkv()
    here = in_layer(untied, 1)
    weights = torch.softmax(q @ k.transpose(2, 3), -1)
    (bias, gate), (tied_bias, tied_gate) = untied.terms(L)[1], tied.terms(L)[1]

    if bias is None:
        bias = torch.zeros(H, L, L)
        assert cls == "zero" and tied_bias is None
    tolerance = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(bias[:, 0], theta[0][:, None].expand(H, L), **tolerance)  # [CLS] to [CLS] included
    torch.testing.assert_close(bias[:, 1:, 0], theta[1][:, None].expand(H, L - 1), **tolerance)
    rest = 0 if tied_bias is None else tied_bias[:, 1:, 1:]
    torch.testing.assert_close(bias[:, 1:, 1:], rest + torch.zeros(H, L - 1, L - 1), check_dtype=False)

    for ours, theirs, neutral in [
        (untied.content(q, k, here), tied.content(q, k, here), 0.0), (gate, tied_gate, 1.0)
    ]:  # fmt: skip
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours[..., 0, :] == neutral).all() and (ours[..., :, 0] == neutral).all()
            torch.testing.assert_close(ours[..., 1:, 1:], theirs[..., 1:, 1:])
    if (value := untied.value(weights, here)) is not None:
        off_cls = weights.clone()
        off_cls[..., 0, :] = off_cls[..., :, 0] = 0
        torch.testing.assert_close(value, tied.value(off_cls, here))


def test_nothing_is_learned_about_cls_where_its_logits_are_zero():
    """The vectors and the two rows of T5's table that are theta elsewhere get no gradient; all that is used does."""
    positions = scramble(Positions("untied+t5", DIMS, "zero"))
    positions.terms(L)[0][0].square().sum().backward()
    vectors, buckets = (positions[name].table.weight.grad.any(1) for name in ("untied", "t5"))
    assert vectors.tolist() == [False, False] + [True] * (L - 1) + [False] * (16 - L)  # theta1, theta2, 1 .. L-1
    assert not buckets[16] and not buckets[32] and buckets[:8].all() and buckets[17:24].all()


# ---- learned frequencies ----


def test_a_step_changes_every_frequency_by_the_same_share():
    scheme = SCHEMES["sinusoidal_learned"](Dims(16, 64, 2, 1, 32, 32))
    before = scheme.omega.detach().clone()
    optimizer = torch.optim.Adam(scheme.parameters(), lr=0.01)
    (scheme.embed(TokenPositions(L)) * torch.randn(L, 64, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step()
    share = (scheme.omega.detach() / before).log().abs()
    assert before.max() / before.min() > 5000
    torch.testing.assert_close(share, torch.full_like(share, 0.01), rtol=0.02, atol=0)


# ---- initial values ----


def encoder_table(position, layers=1):
    """The table of a scheme in a fresh encoder, large enough to measure its spread."""
    torch.manual_seed(0)
    encoder = Encoder(10, 1, layers=layers, width=64, ffn=8, heads=8, max_positions=128, position=position)
    return next(iter(encoder.positions.values())).table


@pytest.mark.parametrize(
    ("position", "std"),
    [
        ("absolute", 0.02), ("absolute:std:0.06", 0.06), ("untied:norm:False:std:1", 1), ("absolute_d:std:0.5", 0.5),
        ("t5", 0.02), ("t5:multiplier:25", 0.0008), ("nonparametric", 0.02), ("factored:std:0.1", 0.1),
    ],
)  # fmt: skip
def test_tables_start_with_their_standard_deviation(position, std):
    table = encoder_table(position)
    weight = table if isinstance(table, torch.nn.Parameter) else table.weight
    assert weight.std().item() == pytest.approx(std, rel=0.1)


def test_a_multiplier_changes_how_fast_t5_learns_not_where_it_starts():
    terms, gradients = [], []
    for position in ("t5", "t5:multiplier:25"):
        torch.manual_seed(0)
        positions = Positions(position, DIMS)
        positions.apply(init_bert)
        bias, _ = positions.terms(L)[0]
        terms.append(bias)
        gradients += torch.autograd.grad(bias.square().sum() / 2, list(positions.parameters()))
    torch.testing.assert_close(terms[1], terms[0])
    torch.testing.assert_close(gradients[1], 25 * gradients[0])


def test_norm_starts_with_its_gain():
    torch.manual_seed(0)
    dims = Dims(max_positions=20, width=64, heads=8, layers=1, head_dim=8, value_dim=8)
    vectors = Positions("absolute:norm:True:gain:0.1", dims).embed(20)
    torch.testing.assert_close(vectors.std(1, correction=0), torch.full((20,), 0.1), rtol=0.1, atol=0)


def test_directions_need_an_even_number_of_heads():
    with pytest.raises(ValueError, match="directions: it needs an even number of heads, not 1"):
        Positions("directions", replace(DIMS, heads=1))
