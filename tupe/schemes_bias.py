"""Logits that do not depend on the tokens, shared by the whole batch.

The letters are those of `positions.py`, whose `PositionScheme` documents the hooks. Tables of schemes show `paper` and
`formula`.
"""

import math

import torch
from torch import Tensor, nn

from .positions import Dims, LayerContext, PositionScheme, register
from .schemes_common import Clipped, LayerNorm, Linear, Table, at_least, per_head
from .token_positions import TokenPositions

# The logit of a key that a head must not see. Every normaliser maps it to exactly 0. -inf would do as well, but
# swish turns that into NaN. Half precision can hold this one.
HIDDEN = -3e4


@register("untied")
class Untied(PositionScheme):
    """TUPE (Ke et al., 2021), equations 7 and 10: (LN(p_i) U_Q) . (LN(p_j) U_K) * scale, shared by all layers.

    Row 0 of the table is p_theta1 (from [CLS]), row 1 is p_theta2 (to [CLS]), position i has row i + 1; so [CLS]'s own
    position, used only if [CLS] is tied, is row 1. U_Q and U_K have biases, as in the released code. norm: the layer
    norm on p_i, after which `std` does not matter.
    """

    paper, formula = "Ke et al. 2021 (TUPE)", "p_i U_Q . p_j U_K / sqrt(2D)"
    extra_terms, bounded, first_word_row = 1, True, 2

    def __init__(self, dims: Dims, norm: bool = True, std: float = 0.02):
        super().__init__(dims)
        self.heads = dims.heads
        self.table = Table(dims.max_positions + 1, dims.width, std)
        self.norm = LayerNorm(dims.width) if norm else None
        self.q = Linear(dims.width, dims.heads * dims.head_dim)
        self.k = Linear(dims.width, dims.heads * dims.head_dim)

    def rows(self, positions: TokenPositions) -> Tensor:
        """[L, C], the table's rows of positions."""
        return self.table(slice(1, positions.length + 1) if positions.drawn is None else positions.drawn + 1)

    def project(self, rows: Tensor) -> list[Tensor]:
        """Queries and keys of rows [R, C], [H, R, D] each, see `per_head`."""
        rows = rows.float()
        rows = rows if self.norm is None else self.norm(rows)
        return [per_head(rows, u, self.heads) for u in (self.q, self.k)]

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        q, k = positions.once(self, lambda: self.project(self.rows(positions)))
        return (q[:, positions.first : positions.last] * scale) @ k.transpose(1, 2)

    def cls_bias(self, scale: float) -> Tensor:
        q, k = self.project(self.table(slice(2)))
        return (q * k).sum(2).T * scale  # [2, H]


@register("absolute_d")
class AbsoluteDisentangled(Untied):
    """BERT-A^d (TUPE, section 4.3): all four terms of words and positions; positions have projections of their own.

    x_i W_Q . x_j W_K + x_i W_Q . p_j U_K + p_i U_Q . x_j W_K + p_i U_Q . p_j U_K, all over sqrt(4D). It differs
    from `untied` only in the two middle terms and the scale.
    """

    paper, formula = "Ke et al. 2021 (BERT-A^d)", "(q_i . p_j U_K + p_i U_Q . k_j + p_i U_Q . p_j U_K) / sqrt(4D)"
    extra_terms, numbered = 3, False

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        pos_q, pos_k = (p.to(q.dtype) for p in self.project(self.rows(layer.positions)))  # [H, L, D]
        return q @ pos_k.transpose(1, 2) + pos_q @ k.transpose(2, 3)


@register("t5")
class T5(PositionScheme):
    """T5 (Raffel et al., 2020) as TUPE-R uses it: a learned scalar per head and bucket of the offset, not scaled.

    Bidirectional: half of the buckets are for keys to the right. Distances from max_distance on share one bucket. The
    bucket of offset 0 counted as positive (16 of 32) never occurs, so its row is theta1 (from [CLS]); an extra last row
    is theta2 (to [CLS]).

    multiplier m: the bias is m times the table, whose initial values are 1 / m of the usual ones. So the first forward
    pass is the same for every m, but an optimizer whose steps do not depend on the size of the gradients (Adam) changes
    the bias m times as fast; more at first, while the table's gradients, which are m times as large, too, are small
    beside Adam's epsilon.
    """

    paper, formula = "Raffel et al. 2020", "b[h, bucket(j - i)]"

    def __init__(self, dims: Dims, buckets: int = 32, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"buckets must be a multiple of 4, not {buckets}")
        if max_distance <= buckets // 4:
            raise ValueError(f"max_distance must be more than buckets / 4, not {max_distance} with {buckets} buckets")
        self.buckets, self.max_distance = buckets, max_distance
        self.multiplier = at_least(1e-6, multiplier=multiplier)
        self.table = Table(buckets + 1, dims.heads, 0.02 / multiplier)

    def rows(self, rows: Tensor | slice) -> Tensor:
        """[R, H], rows of the table times the multiplier."""
        values = self.table(rows).float()
        return values if self.multiplier == 1 else values * self.multiplier

    def bucket_of(self, offset: Tensor) -> Tensor:
        """Bucket of each offset: half of the buckets per sign; of those, half for exact distances, half spaced
        logarithmically."""
        half, exact = self.buckets // 2, self.buckets // 4
        distance = offset.abs()
        # float32, because bfloat16 would move the borders
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(distance < exact, distance, far) + half * (offset > 0)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        return positions.spread(self.rows(self.bucket_of(positions.offsets)).T)

    def cls_bias(self, scale: float) -> Tensor:
        half = self.buckets // 2
        # rows `half` and `buckets`, as a slice: a list of indices would be copied to the GPU
        return self.rows(slice(half, None, half))


@register("clipped")
class ClippedScalar(Clipped):
    """A learned scalar per head and clipped offset, t = 128: the simpler form of T5's buckets (TUPE, footnote on T5;
    Shaw et al., 2018)."""

    paper, formula = "Ke et al. 2021, footnote", "b[h, clip(j - i, 128)]"

    def __init__(self, dims: Dims, max_distance: int = 128):
        super().__init__(dims, max_distance)
        self.table = Table(2 * max_distance + 1, dims.heads)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        by_offset = self.table(self.rows(positions))  # [2S - 1, H]
        return positions.spread(by_offset.float().T)


@register("nonparametric")
class NonParametric(PositionScheme):
    """A free H x L x L matrix of logits: the first failed attempt of TUPE's appendix D. Like T5's bias it is not scaled
    and does not count as a term beside q.k:

        nonparametric:          x_i W_Q . x_j W_K / sqrt(D) + b_ij
        untied+nonparametric:   (x_i W_Q . x_j W_K + p_i U_Q . p_j U_K) / sqrt(2D) + b_ij
    """

    paper, formula = "Ke et al. 2021, app. D", "b[h, i, j]"
    bounded = True

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.table = nn.Parameter(torch.randn(dims.heads, dims.max_positions, dims.max_positions) * 0.02)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        if positions.by_index:
            table = self.table[:, positions.queries[:, None], positions.index]
        else:
            table = self.table[:, positions.first : positions.last, : positions.length]
        return table.to(torch.float32, copy=True)


@register("factored")
class Factored(Clipped):
    """A relative bias from vectors r of clipped offsets: the second failed attempt of TUPE's appendix D.

    It stands where T5's bias does, so it does not count as a term beside q.k. The appendix gives no scale; it has that
    of the others. Without biases in F_Q and F_K.

        factored:          (x_i W_Q . x_j W_K + r_{j-i} F_Q . r_{j-i} F_K) / sqrt(D)
        untied+factored:   (x_i W_Q . x_j W_K + p_i U_Q . p_j U_K + r_{j-i} F_Q . r_{j-i} F_K) / sqrt(2D)
    """

    paper, formula = "Ke et al. 2021, app. D", "r_{j-i} F_Q . r_{j-i} F_K / sqrt(D), sqrt(2D) beside untied"

    def __init__(self, dims: Dims, max_distance: int = 128, std: float = 0.02):
        super().__init__(dims, max_distance)
        self.heads = dims.heads
        self.table = Table(2 * max_distance + 1, dims.width, std)
        self.q = Linear(dims.width, dims.heads * dims.head_dim, bias=False)
        self.k = Linear(dims.width, dims.heads * dims.head_dim, bias=False)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        rows = self.table(self.rows(positions)).float()  # [2S - 1, C]
        q, k = per_head(rows, self.q, self.heads), per_head(rows, self.k, self.heads)  # [H, 2S - 1, D]
        return positions.spread((q * k).sum(2) * scale)


@register("alibi")
class Alibi(PositionScheme):
    """ALiBi (Press et al., 2022): a slope m per head times the distance, -m_h |j - i|, without parameters.

    The paper's is for attention to the left; on both sides alike it cannot tell left from right. Encoders choose
    between two ways here (Press's answer on encoders, issue 5 of attention_with_linear_biases): both sides alike, the
    default; sides: slopes of their own for left and right, here 2H heads' slopes in turn (our choice: he learns them).
    learned: the slopes are learned, as logarithms, from those values on.
    """

    paper, formula = "Press et al. 2022", "-m_h |j - i|"
    undecayed = ("log_slopes",)

    def __init__(self, dims: Dims, sides: bool = False, learned: bool = False):
        super().__init__(dims)
        self.heads, self.sides = dims.heads, sides
        self.log_slopes = nn.Parameter(self.fixed_slopes().log()) if learned else None

    @staticmethod
    def slopes_of(heads: int, device: torch.device | None = None) -> Tensor:
        """2^(-8h/H) for h = 1 .. H if H is a power of two; else the slopes of the next lower power, then every other
        slope of the next higher one."""
        power = 2 ** int(math.log2(heads))
        low = 2.0 ** (-8 * torch.arange(1, power + 1, device=device) / power)
        high = 2.0 ** (-8 * torch.arange(1, 2 * power + 1, 2, device=device) / (2 * power))
        return torch.cat([low, high])[:heads]

    def fixed_slopes(self, device: torch.device | None = None) -> Tensor:
        """[1, H], or with `sides` [2, H]: those to the left, those to the right."""
        count = 2 * self.heads if self.sides else self.heads
        return self.slopes_of(count, device).unflatten(0, (self.heads, -1)).T

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        offsets = positions.offsets
        slopes = self.fixed_slopes(offsets.device) if self.log_slopes is None else self.log_slopes.float().exp()
        return positions.spread(-per_side(slopes, offsets) * offsets.abs())


@register("directions")
class Directions(PositionScheme):
    """Dual Triangle Attention (2604.18603): the first half of the heads sees the keys up to the query, the others see
    the keys from it on. It has no parameters; it stands alone or beside a rotation, as in the paper.

    Theirs splits each of H heads into two of half the width: a model with twice as many heads. Hidden pairs are
    computed here, while their kernel computes half as many logits. Raises ValueError for an odd number of heads.
    """

    paper, formula = "Dual Triangle, 2026", "a_ij = 0 for j > i in half of the heads, for j < i in the others"
    causal = False

    def __init__(self, dims: Dims):
        super().__init__(dims)
        if dims.heads % 2:
            raise ValueError(f"it needs an even number of heads, not {dims.heads}")
        self.heads = dims.heads

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        offsets = positions.offsets
        zeros = (offsets * 0.0).expand(self.heads // 2, -1)  # of any length in traced code, unlike torch.zeros
        left, right = zeros.masked_fill(offsets > 0, HIDDEN), zeros.masked_fill(offsets < 0, HIDDEN)
        return positions.spread(torch.cat([left, right]))


def per_side(values: Tensor, offsets: Tensor) -> Tensor:
    """[1 or 2, H] values, for all keys or for keys to the left and to the right -> [H, 1 or offsets]."""
    return values.T if len(values) == 1 else torch.where(offsets > 0, values[1, :, None], values[0, :, None])


@register("kerple")
class Kerple(PositionScheme):
    """KERPLE (Chi et al., 2022): -a_h log(1 + b_h |j - i|), or with power -a_h |j - i|^{p_h}, 0 < p < 2.

    As the authors' code, a starts in U(0, 2) and b in U(0, 1), with power a in U(0, 1) and p in U(0, 2), at least 0.01.
    They clamp the parameters there; here their logarithms are learned (of p the logit of p / 2), without weight decay.
    A function of |j - i| cannot tell left from right: with sides, our form for encoders, left and right have parameters
    of their own.
    """

    paper, formula = "Chi et al. 2022", "-a_h log(1 + b_h |j - i|)"
    undecayed = "log_factor", "inner"

    def __init__(self, dims: Dims, power: bool = False, sides: bool = False):
        super().__init__(dims)
        self.power = power
        largest, shape = (1.0, 2.0) if power else (2.0, 1.0), (2 if sides else 1, dims.heads)
        factor, inner = (torch.rand(shape).mul(top).clamp(min=0.01) for top in largest)
        self.log_factor = nn.Parameter(factor.log())
        self.inner = nn.Parameter(torch.logit(inner.clamp(max=1.99) / 2) if power else inner.log())

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        offsets = positions.offsets
        distance, factor = offsets.abs(), per_side(self.log_factor.float().exp(), offsets)  # [2S - 1], [H, 1 or 2S - 1]
        if self.power:
            kernel = distance.float() ** per_side(2 * self.inner.float().sigmoid(), offsets)
        else:
            kernel = torch.log1p(per_side(self.inner.float().exp(), offsets) * distance)
        return positions.spread(-factor * kernel)


@register("fire")
class Fire(PositionScheme):
    """FIRE (Li et al., 2024): a small MLP f of the relative distance, f_h(log(1 + c |j - i|) / log(1 + c n)).

    The paper's n is max(threshold, i), the number of keys of a causal query. An encoder's query sees keys on both
    sides; the batch's length as n would make outputs depend on padding, so n is max(threshold, i, j): our form for
    encoders. c and the threshold are learned, as logarithms without weight decay, from 0.1 and `threshold` on. f has
    `width` hidden units with ReLU, PyTorch's initial values, and no last bias, which softmax would not see. One f
    serves all layers, as their FIRE-S; each layer has its own in FIRE: fire:layer. sides: left and right have
    parameters of their own, without which |j - i| cannot tell them apart.
    """

    paper, formula = "Li et al. 2024", "MLP_h(log(1 + c |j - i|) / log(1 + c max(threshold, i, j)))"
    undecayed = "log_c", "log_threshold"

    def __init__(self, dims: Dims, threshold: int = 512, width: int = 32, sides: bool = False):
        super().__init__(dims)
        at_least(1, threshold=threshold)
        at_least(1, width=width)
        copies = 2 if sides else 1
        self.log_c = nn.Parameter(torch.full((copies,), math.log(0.1)))
        self.log_threshold = nn.Parameter(torch.full((copies,), math.log(threshold)))
        self.hidden = nn.Parameter(torch.empty(copies, 2, width).uniform_(-1, 1))  # weights and biases
        self.out = nn.Parameter(torch.empty(copies, dims.heads, width).uniform_(-1, 1) * width**-0.5)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        query, key = positions.queries[:, None], positions.index
        distance, last = (key - query).abs(), torch.maximum(key, query)  # [R, L]
        sides = [self.side(side, distance, last) for side in range(len(self.out))]
        return sides[0] if len(sides) == 1 else torch.where(key > query, sides[1], sides[0])

    def side(self, side: int, distance: Tensor, last: Tensor) -> Tensor:
        """[H, R, L]: f of one set of parameters. last: max(i, j)."""
        c, threshold = self.log_c[side].float().exp(), self.log_threshold[side].float().exp()
        x = torch.log1p(c * distance) / torch.log1p(c * torch.maximum(last, threshold))
        weight, bias = self.hidden[side].float()
        hidden = torch.relu(x[..., None] * weight + bias)  # [R, L, width]
        return (hidden @ self.out[side].float().T).permute(2, 0, 1)


@register("cpb")
class ContinuousBias(PositionScheme):
    """Continuous position bias (Swin v2, Liu et al., 2022): an MLP of the signed logarithm of the offset.

    g_h(sign(j - i) log(1 + |j - i|)), with `width` hidden units and ReLU. As in the authors' code the logit is bounded,
    16 sigmoid(g); here 8 lower, 8 tanh(g / 2), which softmax does not see, so that it starts near 0. They divide
    offsets by the size of the window, which a text does not have, give the logarithm another base, and each layer its
    own MLP: cpb:layer.
    """

    paper, formula = "Liu et al. 2022 (Swin v2)", "8 tanh(MLP_h(sign(j - i) log(1 + |j - i|)) / 2)"

    def __init__(self, dims: Dims, width: int = 512):
        super().__init__(dims)
        self.hidden = Linear(1, at_least(1, width=width))
        self.out = Linear(width, dims.heads, bias=False)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        offsets = positions.offsets
        x = offsets.sign() * torch.log1p(offsets.abs().float())
        by_offset = 8 * torch.tanh(self.out(torch.relu(self.hidden(x[:, None]))) / 2)  # [2S - 1, H]
        return positions.spread(by_offset.T)
