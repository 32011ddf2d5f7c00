"""Rotations, gates and windows, which add neither to the embeddings nor to the logits.

The letters are those of `positions.py`, whose `PositionScheme` documents the hooks. Tables of schemes show `paper` and
`formula`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .positions import Dims, LayerContext, PositionScheme, register
from .schemes_common import Clipped, LearnedFrequencies, Linear, at_least, frequencies, in_float32
from .token_positions import TokenPositions


@register("rope")
class Rope(LearnedFrequencies, PositionScheme):
    """RoPE (Su et al., 2021): q and k rotated by their position, so that their product depends on the offset. No
    parameters, unless they are learned.

    fraction: the share of the columns that is rotated, the first ones (GPT-NeoX: 0.25); their number is rounded to an
    even one, at least 2. learned: the frequencies are learned, from the fixed ones on. local_base: the base of all
    layers but every `every`th, counted from the first (ModernBERT: base 160000, local_base 10000, beside windows).
    local: every `every`th layer, which sees all beside windows, has no rotation (RNoPE: Yang et al., 2025; SWAN:
    Puvvada et al., 2025, with `log_length`).

    Three options extend a trained model to sequences s times as long. interpolate:s divides positions by s (Chen et
    al., 2023). ntk:s multiplies the base by s^{d / (d - 2)}, d being the rotated columns, which divides the lowest
    frequency by s and keeps the highest. yarn:s (Peng et al., 2024) divides only the low frequencies, as the authors'
    code does: a ramp leads from the columns that turn 32 times to the columns that turn once within max_positions. It
    takes the max_positions that the model had when it got the option, and keeps the number with the weights. It also
    multiplies q and k by 0.1 ln s + 1, including the columns that are not rotated (Hugging Face scales only the rotated
    ones). Layers with a local_base stay as they were trained: behind a window, longer sequences bring no longer
    distances. Raises ValueError for two of these, and for options that contradict each other.
    """

    paper, formula = "Su et al. 2021", "(R_i q_i) . (R_j k_j) / sqrt(D)"
    numbered = False  # unless an option says so
    trained: Tensor

    def __init__(
        self, dims: Dims, base: float = 10000.0, fraction: float = 1.0, learned: bool = False, local_base: float = 0.0,
        every: int = 3, interpolate: float = 1.0, ntk: float = 1.0, yarn: float = 1.0, local: bool = False,
    ):  # fmt: skip
        super().__init__(dims)
        at_least(1, base=base)
        at_least(1, local_base=local_base or base)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be more than 0 and at most 1, not {fraction}")
        for name, value in {"every": every, "interpolate": interpolate, "ntk": ntk, "yarn": yarn}.items():
            at_least(1, **{name: value})
        if sum(factor > 1 for factor in (interpolate, ntk, yarn)) > 1:
            raise ValueError("only one of interpolate, ntk and yarn can be more than 1")
        if learned and local_base:
            raise ValueError("learned:True has no bases; local_base has no meaning beside it")
        if every != 3 and not (local or local_base):
            raise ValueError("every has no meaning without local:True or a local_base")
        if (local or local_base) and every == 1:
            raise ValueError("every:1 leaves no local layer: every must be more than 1")
        if local and (local_base or max(interpolate, ntk, yarn) > 1):
            raise ValueError("local:True turns only local layers, which have one base and see no longer distances in "
                             "longer sequences: leave out local_base, interpolate, ntk and yarn")  # fmt: skip
        self.base, self.fraction, self.learned, self.local = base, fraction, learned, local
        self.local_base, self.every = local_base or base, every
        self.numbered |= local or self.local_base != base
        self.interpolate, self.ntk, self.yarn = interpolate, ntk, yarn
        for width in (dims.head_dim, dims.value_dim):
            frequencies(min(width, self.columns(width)))  # refuses an odd width
        if yarn > 1:
            self.register_buffer("trained", torch.tensor(dims.max_positions))
        if learned:
            self.start_frequencies(self.columns(dims.head_dim), base)

    def columns(self, width: int) -> int:
        """The number of rotated columns of vectors of this width."""
        return width if self.fraction == 1 else max(2, 2 * round(width * self.fraction / 2))

    def frequencies(self, columns: int, device: torch.device) -> Tensor:
        """[columns / 2]: the frequencies of training or, for longer sequences, lower ones."""
        omega = self.omega if self.learned else frequencies(columns, device, self.base)
        if self.interpolate > 1:
            return omega / self.interpolate
        if self.ntk > 1 and columns > 2:
            m = torch.arange(omega.size(-1), device=device)
            return omega * self.ntk ** (-2 * m / (columns - 2))
        if self.yarn > 1:
            m, length = torch.arange(omega.size(-1), device=device), self.trained.float()
            # the columns that turn 32 times and once
            low, high = (columns * (length / (2 * math.pi * n)).log() / (2 * math.log(self.base)) for n in (32, 1))
            low, high = low.floor().clamp(min=0), high.ceil().clamp(max=columns - 1)
            slow = ((m - low) / (high - low).clamp(min=0.001)).clamp(0, 1).float()  # 0: keep it, 1: divide it
            return omega * (1 - slow + slow / self.yarn)
        return omega

    def has_local_base(self, layer: LayerContext) -> bool:
        return self.local_base != self.base and layer.index % self.every > 0

    def angles(self, width: int, layer: LayerContext) -> Tensor:
        """[L, columns / 2], by which the rows of vectors of this width are rotated."""
        index, columns = layer.positions.index, self.columns(width)
        if self.has_local_base(layer):
            return index[:, None] * frequencies(columns, index.device, self.local_base)
        return index[:, None] * self.frequencies(columns, index.device)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        if self.local and layer.index % self.every == 0:
            return q, k, v
        angle = self.angles(q.size(-1), layer)
        cos, sin = angle.cos(), angle.sin()
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.yarn > 1 and not self.has_local_base(layer):
            q, k = (x * (0.1 * math.log(self.yarn) + 1) for x in (q, k))
        return q, k, v


@register("rope_values")
class RopeValues(Rope):
    """RoPE on the values too: o_i = R_i^-1 sum_j a_ij R_j v_j, so that the output depends on offsets too (Su, 2025)."""

    paper, formula = "Su 2025", "rope, and o_i = sum_j a_ij R_{j-i} v_j"

    def __init__(self, dims: Dims, base: float = 10000.0, fraction: float = 1.0):
        super().__init__(dims, base, fraction)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().rotate(q, k, v, layer)
        angle = self.angles(v.size(-1), layer)
        return q, k, turned(v, angle.cos(), angle.sin())

    def unrotate(self, out: Tensor, layer: LayerContext) -> Tensor:
        angle = self.angles(out.size(-1), layer)
        return turned(out, angle.cos(), -angle.sin())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., L, D] with columns (2m, 2m + 1) of row i rotated by the angle of cos[i, m] and sin[i, m]. cos, sin:
    [L, D / 2], or for each head [H, L, D / 2], or for each sequence and head [B, H, L, D / 2]; with fewer columns, the
    last ones of x stay. FoPE's sums of cosines and sines stretch the columns, too."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    columns = 2 * cos.size(-1)
    even, odd = x[..., :columns:2], x[..., 1:columns:2]
    new = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return new if columns == x.size(-1) else torch.cat([new, x[..., columns:]], dim=-1)


@register("fope")
class Fope(PositionScheme):
    """FoPE (Hua et al., 2025): RoPE, whose cosines and sines are sums over all frequencies.

    Of columns (2m, 2m + 1) of head h the cosine is sum_f A[h, f, m] cos(omega_f i), the sine likewise with B. A and B
    are 1 on the diagonal plus noise of standard deviation std (the authors' comes from a Xavier normal of three
    dimensions, 0.01 for a head of 128), divided by their sums over f: an option of the authors' code (`fourier_norm`)
    that is off in it, and that equation 13 does not have. Frequencies with a period longer than the max_positions that
    the model had when it got the option, which stay with its weights, are left out, and their columns are not rotated.
    All layers share A and B. In the authors' code each layer draws its own, at most half of the column pairs get sums,
    and the others are turned by 45 degrees and twice as long in q k.
    """

    paper, formula = "Hua et al. 2025 (FoPE)", "as rope, cos and sin sums over all frequencies, those of long periods 0"
    numbered = False
    trained: Tensor
    mixtures: Tensor

    def __init__(self, dims: Dims, base: float = 10000.0, std: float = 0.01):
        super().__init__(dims)
        self.base, self.width = at_least(1, base=base), dims.head_dim
        pairs = len(frequencies(dims.head_dim))
        mixtures = torch.eye(pairs) + at_least(0, std=std) * torch.randn(2, dims.heads, pairs, pairs)
        self.register_buffer("trained", torch.tensor(dims.max_positions))
        kept = self.kept(frequencies(self.width, base=self.base))
        mixtures = mixtures / torch.where(kept, (mixtures * kept[:, None]).sum(-2, keepdim=True), 1.0)
        self.register_buffer("mixtures", mixtures)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        omega = frequencies(self.width, q.device, self.base)
        kept = self.kept(omega)
        angle = layer.positions.index[:, None] * omega  # [L, D / 2]
        waves = zip((angle.cos(), angle.sin()), self.mixtures.float(), strict=True)
        cos, sin = (wave * kept @ mixture for wave, mixture in waves)  # [H, L, D / 2] each
        cos, sin = torch.where(kept, cos, 1.0), torch.where(kept, sin, 0.0)
        return turned(q, cos, sin), turned(k, cos, sin), v

    def kept(self, omega: Tensor) -> Tensor:
        """Whether a frequency has a period that training saw, [D / 2]."""
        return omega * self.trained >= 2 * math.pi


@register("selective_rope")
class SelectiveRope(PositionScheme):
    """Selective RoPE (Movahedi et al., 2026): RoPE, where each token decides how far it turns all that come after it.

    The angle of token i is omega_m times the sum of phi_hm(x_l) over the tokens l up to i; phi is a projection of the
    layer's input through `rank` numbers, each layer's own. So the phase between two tokens is the sum over those
    between them, to the left as to the right. phi = 1 would be RoPE. The base is the authors'. Their code also projects
    each head's part of x, at length 1, and has a short convolution before the sum: both are left out here.
    """

    paper, formula = "Movahedi et al. 2026 (Selective RoPE)", "rope, by the angle omega sum_{l <= i} phi_h(x_l)"
    own_projections = True

    def __init__(self, dims: Dims, base: float = 500000.0, rank: int = 16):
        super().__init__(dims)
        self.base, self.heads, self.width = at_least(1, base=base), dims.heads, dims.head_dim
        pairs, rank = len(frequencies(dims.head_dim)), at_least(1, rank=rank)
        inputs = dims.input_width or dims.width
        self.down = nn.ModuleList(Linear(inputs, rank, bias=False) for _ in range(dims.layers))
        self.up = nn.ModuleList(Linear(rank, dims.heads * pairs, bias=False) for _ in range(dims.layers))

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        steps = self.up[layer.index](self.down[layer.index](layer.input()))
        steps = layer.counted(in_float32(steps))  # [B, L, C / 2]
        phase = steps.cumsum(1).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, L, D / 2]
        angle = phase * frequencies(self.width, q.device, self.base)
        return turned(q, angle.cos(), angle.sin()), turned(k, angle.cos(), angle.sin()), v


@register("pope")
class Pope(PositionScheme):
    """PoPE (Gopalakrishnan et al., 2025): every column is a number in polar coordinates, its length softplus(q_c) or
    softplus(k_c), and its angle the position's, omega_c i; for keys delta_hc more.

    The logit is sum_c softplus(q_c) softplus(k_c) cos(omega_c (j - i) + delta_c), so that what is looked for says
    nothing about where. delta starts at 0 and stays within [-2 pi, 0], as in the authors' code; each layer has its own
    in theirs: pope:layer. The backends compute it as products of vectors twice as wide.
    """

    paper = "Gopalakrishnan et al. 2025 (PoPE)"
    formula = "sum_c softplus(q_ic) softplus(k_jc) cos(omega_c (j - i) + delta_hc) / sqrt(D)"
    undecayed, numbered = ("delta",), False

    def __init__(self, dims: Dims, base: float = 10000.0):
        super().__init__(dims)
        self.base = at_least(1, base=base)
        self.delta = nn.Parameter(torch.zeros(dims.heads, dims.head_dim))

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        omega = frequencies(2 * q.size(-1), q.device, self.base)  # [D]
        angle = layer.positions.index[:, None] * omega  # [L, D]
        delta = self.delta.float().clamp(-2 * math.pi, 0)[:, None]  # [H, 1, D]
        return in_the_plane(q, angle), in_the_plane(k, angle + delta), v


def in_the_plane(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, H, L, D] -> [B, H, L, 2D], points at distances softplus(x), in the directions `angle` [L or H, L, D]."""
    length = F.softplus(in_float32(x))
    return torch.cat([length * angle.cos(), length * angle.sin()], dim=-1).to(x.dtype)


@register("log_length")
class LogLength(PositionScheme):
    """Logits of words that grow with the logarithm of the number of tokens, so that attention stays as sharp in longer
    sequences: SSMax (Nakanishi, 2025).

    q . k times s ln n, s for each layer and head, which starts at 1 / ln(max_positions): at that length nothing
    changes. every: only in every `every`th layer, counted from the first (SWAN: in those that see all). Terms of other
    schemes are not scaled. Says nothing about positions: beside another scheme.
    """

    paper, formula = "Nakanishi 2025 (SSMax)", "s_h ln(n) q_i . k_j / sqrt(D), n tokens"
    only_scales = own_projections = True
    causal = False  # n counts later tokens too
    undecayed = ("scale",)  # 0 would be equal weights for all

    def __init__(self, dims: Dims, every: int = 1):
        super().__init__(dims)
        self.every = at_least(1, every=every)
        self.scale = nn.Parameter(torch.full((dims.layers, dims.heads), 1 / math.log(max(2, dims.max_positions))))

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        if layer.index % self.every:
            return q, k, v
        count = layer.counted(torch.ones_like(q[:, 0, :, 0], dtype=torch.float32)).sum(1)  # [B]
        factor = self.scale[layer.index].float() * count.clamp(min=1).log()[:, None]  # [B, H]
        return q * factor[:, :, None, None].to(q.dtype), k, v


@register("urpe")
class Urpe(Clipped):
    """URPE (Luo et al., 2022): weights multiplied by a learned Toeplitz matrix, c_ij = g[h, clip(j - i)], initialised
    to 1."""

    paper, formula = "Luo et al. 2022", "a_ij g[h, clip(j - i, 128)]"
    undecayed = ("table",)  # decay would pull gates towards 0, which shuts off every token

    def __init__(self, dims: Dims, max_distance: int = 128):
        super().__init__(dims, max_distance)
        self.table = nn.Parameter(torch.ones(dims.heads, 2 * max_distance + 1))

    def gate(self, positions: TokenPositions) -> Tensor:
        by_offset = self.table[:, self.rows(positions)]  # [H, 2S - 1]
        return positions.spread(by_offset.float())


@register("window")
class Window(PositionScheme):
    """Local attention (Longformer: Beltagy et al., 2020): tokens see each other up to a distance of size / 2, but in
    every `every`th layer, counted from the first, all see all (ModernBERT: Warner et al., 2024; its 128 and 3 are the
    defaults). every = 0: no layer is global. No parameters; usually beside another scheme.

    The fast paths do not compute the logits of other pairs. If [CLS] is untied, it sees all and is seen by all, as
    Longformer's global tokens.
    """

    paper, formula = "Warner et al. 2024 (ModernBERT)", "a_ij = 0 for |j - i| > size / 2, but in every third layer"

    def __init__(self, dims: Dims, size: int = 128, every: int = 3):
        super().__init__(dims)
        if every == 1 or every < 0:
            raise ValueError(f"every must be 0 (no layer is global), or 2 or more, not {every}")
        self.distance, self.every, self.numbered = at_least(2, size=size) // 2, every, every > 0

    def reach(self, layer: LayerContext) -> int | None:
        return None if self.every and layer.index % self.every == 0 else self.distance
