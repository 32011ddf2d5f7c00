"""Token-wise work without padding: which rows of a batch are real tokens, and which of them somebody wants.

B batch, L sequence length, T rows of token-wise work, C model width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .cpu import rounded_up


class Packing(NamedTuple):
    """Where the real tokens of a batch are. Token-wise work is done on them alone: x [T, C], of which attention alone
    makes [B, L, C]. Without padding, or with so little that it does not pay, x is [B, L, C] throughout.

    T is `rounded_up`: the last rows of x may be tokens of padding.
    """

    real: Tensor | None = None  # [B, L], False at padding; None: there is none
    places: Tensor | None = None  # [T], the place in the batch, of B L, of each row of x; None: x is [B, L, C]
    rows: Tensor | None = None  # [B L], the row of x of each place, or T if it has none
    lengths: list[int] | None = None  # of `longest_first`: of its sequences, to their last real token

    @classmethod
    def of(cls, real: Tensor, count: int) -> "Packing":
        """real: [B, L], False at padding; count: how many are real, which a GPU need not be asked for then."""
        if count == real.numel():
            return NO_PADDING
        # Compiled code is made for one shape, and every batch has another T; the first test alone would be a new one.
        if torch.compiler.is_compiling() or (size := rounded_up(count)) >= real.numel():
            return cls(real)
        places = real.logical_not().flatten().byte().argsort(stable=True)[:size]  # real tokens first
        return cls(real, places, rows_of(places, real))

    def longest_first(self) -> "Packing":
        """The same rows of x, and the longest sequences first."""
        longest = self.real.size(1)
        lengths, order = (self.real * torch.arange(1, longest + 1)).amax(1).sort(descending=True, stable=True)
        sequence, column = self.places // longest, self.places % longest
        real, places = self.real[order], order.argsort()[sequence] * longest + column
        return Packing(real, places, rows_of(places, real), lengths=lengths.tolist())

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [T, C]"""
        return x if self.places is None else Pack.apply(x.flatten(0, 1), self.places, self.rows)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, C] -> [B, L, C], 0 at padding."""
        return x if self.places is None else Unpack.apply(x, self.places, self.rows).view(*self.real.shape, -1)

    def select(self, wanted: Tensor, of_attention: "Packing", length: int) -> "Selection":
        """wanted: [n], places in the batch, of B L. On a CPU they become `rounded_up` many; the last mean nothing.
        of_attention: the same in the order in which attention takes its sequences. length: L."""
        if wanted.device.type == "cpu":
            wanted = F.pad(wanted, (0, rounded_up(len(wanted)) - len(wanted)))
        if self.places is None:
            return Selection(wanted, wanted, length)
        rows = self.rows[wanted].clamp(max=len(self.places) - 1)  # at padding there is none
        return Selection(rows, of_attention.places[rows], length)


NO_PADDING = Packing()


def rows_of(places: Tensor, real: Tensor) -> Tensor:
    """`Packing.rows` from its places and real."""
    rows = torch.full_like(real, len(places), dtype=torch.long).flatten()
    return rows.scatter_(0, places, torch.arange(len(places), device=real.device))


class Selection(NamedTuple):
    """The tokens whose features somebody wants: the last layer computes no others from its attention on."""

    rows: Tensor  # [m], their rows of x
    places: Tensor  # [m], their places in the batch, in the order in which attention takes its sequences
    length: int  # L

    def of_tokens(self, x: Tensor) -> Tensor:
        """[T, C] or [B, L, C] -> [m, C]"""
        return x.flatten(0, -2).index_select(0, self.rows)

    def of_batch(self, x: Tensor) -> Tensor:
        """[B, L, C], or [B, 1, C] of first tokens alone -> [m, C]"""
        places = self.places if x.size(1) == self.length else self.places // self.length
        return x.flatten(0, 1).index_select(0, places)


def spread(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, C] -> [B L, C]; a row of zeros wherever `rows` is T."""
    return torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, rows)


class Pack(torch.autograd.Function):
    """Rows by their index. PyTorch's own backward pass adds rows up one by one; here none is selected twice."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return spread(grad, *ctx.saved_tensors), None, None


class Unpack(torch.autograd.Function):
    """The inverse of `Pack`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return spread(x, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None
