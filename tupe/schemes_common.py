"""Parts that several position encodings share: tables and their options, offsets, sinusoids.

B batch, L sequence length, C model width, H heads, D width of a head. The offset of key j from query i is j - i.

Options that several schemes have: std, the initial standard deviation of the table; max_distance, where offsets are
clipped; amplitude, of sinusoids.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cpu import linear
from .positions import Dims, PositionScheme
from .token_positions import TokenPositions


class Table(nn.Embedding):
    """An embedding table of positions or offsets with an initial standard deviation of its own."""

    def __init__(self, rows: int, width: int, std: float = 0.02):
        self.std = at_least(0, std=std)
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, rows: Tensor | slice) -> Tensor:
        """A copy of rows by their index, or of a slice, whose backward pass is the faster one."""
        return self.weight[rows].clone() if isinstance(rows, slice) else super().forward(rows)


class Linear(nn.Linear):
    """A projection of positions, in float32 whatever the precision of its parameters. In a layer, autocast decides."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class LayerNorm(nn.LayerNorm):
    """A layer norm in float32, whatever the precision of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


def at_least(smallest: float, **option: Any) -> Any:
    """The value of the one option given as `name=value`. Raises ValueError if it is less than `smallest`."""
    ((name, value),) = option.items()
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest:g}, not {value}")
    return value


def in_float32(x: Tensor) -> Tensor:
    """x, of half precision in float32: where sums are long."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def frequencies(width: int, device: torch.device | str | None = None, base: float = 10000.0) -> Tensor:
    """omega_i = base^(-2i/width), i = 0 .. width/2 - 1. Raises ValueError for an odd width."""
    if width % 2:
        raise ValueError(f"sinusoids and rotations need an even width, not {width}")
    return base ** (-torch.arange(0, width, 2, device=device).float() / width)


def waves(omega: Tensor, positions: Tensor) -> Tensor:
    """[P] positions -> [P, 2 len(omega)]: sines in the even columns, cosines in the odd ones, in float32."""
    angle = positions[:, None].float() * omega.float()  # [P, width / 2]
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class LearnedFrequencies(nn.Module):
    """Mixin of schemes that learn frequencies omega [width / 2], from `frequencies` on.

    The parameter is log omega, without weight decay: a step of Adam's, as large as the learning rate whatever the
    gradient, then changes every frequency by the same share. Steps of omega itself would be larger than the small
    frequencies are, and decay would lengthen all waves. Under --fp16 and --bf16 log omega is rounded, as all
    parameters are (omega by up to 0.4 % and 3 %); --amp and --autocast bf16 keep it.
    """

    undecayed: tuple[str, ...] = ("log_omega",)

    def start_frequencies(self, width: int, base: float = 10000.0) -> None:
        self.log_omega = nn.Parameter(frequencies(width, base=base).log())

    @property
    def omega(self) -> Tensor:
        return self.log_omega.float().exp()


def per_head(rows: Tensor, projection: nn.Module, heads: int) -> Tensor:
    """[rows, C], projected and split into heads: [H, rows, D]. The projection is called, its weight never read: it may
    be an adapter, quantised, or a shard."""
    return projection(rows).unflatten(1, (heads, -1)).transpose(0, 1)


class Clipped(PositionScheme):
    """Base of schemes with one table row per offset j - i, clipped to max_distance t: row t + clip(j - i, -t, t)."""

    def __init__(self, dims: Dims, max_distance: int):
        super().__init__(dims)
        self.max_distance = at_least(1, max_distance=max_distance)

    def rows(self, positions: TokenPositions) -> Tensor:
        """[2S - 1], the row of every offset."""
        return positions.offsets.clamp(-self.max_distance, self.max_distance) + self.max_distance
