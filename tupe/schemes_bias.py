"""Logits that do not depend on the tokens, shared by the whole batch.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, E width of a value head, N layers.
Position i = 0 is [CLS]; the offset of key j from query i is j - i. What a hook returns is documented in
`positions.PositionScheme`. Tables of schemes show `paper` and `formula`.
"""

import math

import torch
from torch import Tensor, nn

from .positions import Dims, PositionScheme, register
from .schemes_common import Clipped, Table, layer_norm, per_head, positive, times, toeplitz


@register("untied")
class Untied(PositionScheme):
    """TUPE (Ke et al., 2021), equations 7 and 10: (LN(p_i) U_Q) . (LN(p_j) U_K) * scale, shared by all layers.

    Row 0 of the table is p_theta1 (from [CLS]), row 1 is p_theta2 (to [CLS]), position i has row i + 1; so [CLS]'s own
    position, used only if [CLS] is tied, is row 1. U_Q and U_K have biases, as in the released code. norm: the layer
    norm on p_i, after which `std` does not matter.
    """

    paper, formula = "Ke et al. 2021 (TUPE)", "p_i U_Q . p_j U_K / sqrt(2D)"
    extra_terms = 1

    def __init__(self, dims: Dims, norm: bool = True, std: float = 0.02):
        super().__init__(dims)
        self.heads = dims.heads
        self.table = Table(dims.max_positions + 1, dims.width, std)
        self.norm = nn.LayerNorm(dims.width) if norm else None
        self.q = nn.Linear(dims.width, dims.heads * dims.head_dim)
        self.k = nn.Linear(dims.width, dims.heads * dims.head_dim)

    def project(self, start: int, end: int) -> list[Tensor]:
        """Queries and keys of table rows start..end in float32, [H, rows, D] each."""
        rows = self.table.weight[start:end].float()
        rows = rows if self.norm is None else layer_norm(rows, self.norm)
        return [per_head(rows, u, self.heads) for u in (self.q, self.k)]

    def bias(self, length: int, scale: float) -> Tensor:
        q, k = self.project(1, length + 1)
        return (q * scale) @ k.transpose(1, 2)

    def cls_bias(self, scale: float) -> Tensor:
        q, k = self.project(0, 2)
        return (q * k).sum(2).T * scale  # [2, H]


@register("absolute_d")
class AbsoluteDisentangled(Untied):
    """BERT-A^d (TUPE, section 3.2): all four terms of words and positions; positions have projections of their own.

    x_i W_Q . x_j W_K + x_i W_Q . p_j U_K + p_i U_Q . x_j W_K + p_i U_Q . p_j U_K, all over sqrt(4D). It differs
    from `untied` in the two middle terms and the scale alone.
    """

    paper, formula = "Ke et al. 2021 (BERT-A^d)", "(q_i . p_j U_K + p_i U_Q . k_j + p_i U_Q . p_j U_K) / sqrt(4D)"
    extra_terms = 3

    def content(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        pos_q, pos_k = (p.to(q.dtype) for p in self.project(1, q.size(2) + 1))  # [H, L, D]
        return q @ pos_k.transpose(1, 2) + pos_q @ k.transpose(2, 3)


@register("t5")
class T5(PositionScheme):
    """T5 (Raffel et al., 2020) as TUPE-R uses it: a learned scalar per head and bucket of the offset, not scaled.

    Bidirectional: half of the buckets are for keys to the right. Distances from max_distance on share one bucket. The
    bucket of offset 0 counted as positive (16 of 32) never occurs, so its row is theta1 (from [CLS]); an extra last row
    is theta2 (to [CLS]).
    """

    paper, formula = "Raffel et al. 2020", "b[h, bucket(j - i)]"

    def __init__(self, dims: Dims, buckets: int = 32, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"buckets must be a multiple of 4, not {buckets}")
        if max_distance <= buckets // 4:
            raise ValueError(f"max_distance must be more than buckets / 4, not {max_distance} with {buckets} buckets")
        self.buckets, self.max_distance, self.multiplier = buckets, max_distance, positive(multiplier=multiplier)
        self.table = Table(buckets + 1, dims.heads, 0.02 / multiplier)
        offsets = torch.arange(1 - dims.max_positions, dims.max_positions)
        self.register_buffer("bucket", self.bucket_of(offsets), persistent=False)  # [2 L_max - 1]

    def bucket_of(self, offset: Tensor) -> Tensor:
        """Bucket of each offset: half of the buckets per sign; of those, half for exact distances, half spaced
        logarithmically."""
        half, exact = self.buckets // 2, self.buckets // 4
        distance = offset.abs()
        # float32, because bfloat16 would move the borders
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(distance < exact, distance, far) + half * (offset > 0)

    def bias(self, length: int, scale: float) -> Tensor:
        middle = self.bucket.size(0) // 2
        by_offset = self.table(self.bucket[middle - length + 1 : middle + length])  # [2L - 1, H]
        return toeplitz(times(by_offset.float().T, self.multiplier), length)

    def cls_bias(self, scale: float) -> Tensor:
        half = self.buckets // 2
        # rows `half` and `buckets`, as a slice: a list of indices would be copied to the GPU
        return times(self.table.weight[half::half].float(), self.multiplier)


@register("clipped")
class ClippedScalar(Clipped):
    """A learned scalar per head and clipped offset, t = 128: the simpler form of T5's buckets (TUPE, footnote on T5;
    Shaw et al., 2018)."""

    paper, formula = "Ke et al. 2021, footnote", "b[h, clip(j - i, 128)]"

    def __init__(self, dims: Dims, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims, max_distance)
        self.multiplier = positive(multiplier=multiplier)
        self.table = Table(2 * max_distance + 1, dims.heads, 0.02 / multiplier)

    def bias(self, length: int, scale: float) -> Tensor:
        by_offset = self.table(self.index(length, self.table.weight.device))  # [2L - 1, H]
        return toeplitz(times(by_offset.float().T, self.multiplier), length)


@register("nonparametric")
class NonParametric(PositionScheme):
    """A free H x L x L matrix of logits: the first failed attempt of TUPE's appendix D. Like T5's bias it is not scaled
    and does not count as a term beside q.k:

        nonparametric:          x_i W_Q . x_j W_K / sqrt(D) + b_ij
        untied+nonparametric:   (x_i W_Q . x_j W_K + p_i U_Q . p_j U_K) / sqrt(2D) + b_ij
    """

    paper, formula = "Ke et al. 2021, app. D", "b[h, i, j]"

    def __init__(self, dims: Dims, multiplier: float = 1.0):
        super().__init__(dims)
        self.multiplier, shape = positive(multiplier=multiplier), (dims.heads, dims.max_positions, dims.max_positions)
        self.table = nn.Parameter(torch.randn(shape) * (0.02 / multiplier))

    def bias(self, length: int, scale: float) -> Tensor:
        return times(self.table[:, :length, :length].float(), self.multiplier)


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
        self.q = nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False)
        self.k = nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False)

    def bias(self, length: int, scale: float) -> Tensor:
        rows = self.table(self.index(length, self.table.weight.device)).float()  # [2L - 1, C]
        q, k = per_head(rows, self.q, self.heads), per_head(rows, self.k, self.heads)  # [H, 2L - 1, D]
        return toeplitz((q * k).sum(2) * scale, length)


@register("alibi")
class Alibi(PositionScheme):
    """ALiBi (Press et al., 2022), symmetric for encoders: a fixed slope per head times the distance. No parameters."""

    paper, formula = "Press et al. 2022", "-m_h |j - i|"

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.heads, self.max_positions = dims.heads, dims.max_positions
        distance = torch.arange(1 - dims.max_positions, dims.max_positions).abs()
        self.register_buffer("distance", distance, persistent=False)  # integers: `half()` would round others

    @staticmethod
    def slopes_of(heads: int, device: torch.device | None = None) -> Tensor:
        """2^(-8h/H) for h = 1 .. H if H is a power of two; else the slopes of the next lower power, then every other
        slope of the next higher one."""
        power = 2 ** int(math.log2(heads))
        low = 2.0 ** (-8 * torch.arange(1, power + 1, device=device) / power)
        high = 2.0 ** (-8 * torch.arange(1, 2 * power + 1, 2, device=device) / (2 * power))
        return torch.cat([low, high])[:heads]

    def bias(self, length: int, scale: float) -> Tensor:
        distance = self.distance[self.max_positions - length :][: 2 * length - 1]
        return toeplitz(-self.slopes_of(self.heads, distance.device)[:, None] * distance, length)
