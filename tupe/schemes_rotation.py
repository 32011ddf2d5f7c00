"""Rotations and gates, which change neither the embeddings nor the logits.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, E width of a value head, N layers.
Position i = 0 is [CLS]; the offset of key j from query i is j - i. What a hook returns is documented in
`positions.PositionScheme`. Tables of schemes show `paper` and `formula`.
"""

import torch
from torch import Tensor, nn

from .positions import Dims, PositionScheme, register
from .schemes_common import Clipped, LearnedFrequencies, frequencies, positive, times, toeplitz


@register("rope")
class Rope(LearnedFrequencies, PositionScheme):
    """RoPE (Su et al., 2021): q and k rotated by their position, so that their product depends on the offset. No
    parameters.

    fraction: the share of the columns that is rotated, the first ones (GPT-NeoX: 0.25); their number is rounded to an
    even one, at least 2. learned: the frequencies are learned, from the fixed ones on.
    """

    paper, formula = "Su et al. 2021", "(R_i q_i) . (R_j k_j) / sqrt(D)"

    def __init__(self, dims: Dims, base: float = 10000.0, fraction: float = 1.0, learned: bool = False):
        super().__init__(dims)
        if not base > 1:
            raise ValueError(f"base must be more than 1, not {base}")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be more than 0 and at most 1, not {fraction}")
        self.base, self.fraction, self.learned = base, fraction, learned
        if learned:
            self.start_frequencies(self.columns(dims.head_dim), base)

    def columns(self, width: int) -> int:
        """How many columns of vectors of this width are rotated."""
        return width if self.fraction == 1 else max(2, 2 * round(width * self.fraction / 2))

    def rotated(self, x: Tensor, sign: int = 1) -> Tensor:
        """x [..., L, D] with each row rotated by its position times sign."""
        columns = self.columns(x.size(-1))
        omega = self.omega if self.learned else frequencies(columns, x.device, self.base)
        if columns == x.size(-1):
            return rotated(x, omega, sign)
        return torch.cat([rotated(x[..., :columns], omega, sign), x[..., columns:]], dim=-1)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), v


@register("rope_values")
class RopeValues(Rope):
    """RoPE on the values too: o_i = R_i^-1 sum_j a_ij R_j v_j, so that the output depends on offsets too (Su, 2022)."""

    paper, formula = "Su 2022", "rope, and o_i = sum_j a_ij R_{j-i} v_j"

    def __init__(self, dims: Dims, base: float = 10000.0, fraction: float = 1.0):
        super().__init__(dims, base, fraction)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.rotated(x) for x in (q, k, v))

    def unrotate(self, out: Tensor) -> Tensor:
        return self.rotated(out, -1)


def rotated(x: Tensor, omega: Tensor, sign: int = 1) -> Tensor:
    """x [..., L, D] with columns (2m, 2m + 1) rotated by the angle sign * i * omega_m at position i; omega: [D / 2]."""
    angle = sign * torch.arange(x.size(-2), device=x.device)[:, None] * omega  # [L, D / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


@register("urpe")
class Urpe(Clipped):
    """URPE (Luo et al., 2022): weights multiplied by a learned Toeplitz matrix, c_ij = g[h, clip(j - i)], initialised
    to 1."""

    paper, formula = "Luo et al. 2022", "a_ij g[h, clip(j - i, 128)]"

    def __init__(self, dims: Dims, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims, max_distance)
        self.multiplier = positive(multiplier=multiplier)
        self.table = nn.Parameter(torch.ones(dims.heads, 2 * max_distance + 1) / multiplier)

    def gate(self, length: int) -> Tensor:
        by_offset = self.table[:, self.index(length, self.table.device)]  # [H, 2L - 1]
        return toeplitz(times(by_offset.float(), self.multiplier), length)
