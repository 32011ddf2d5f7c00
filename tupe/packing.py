"""Token-wise work without padding: which tokens of a batch are not padding, and which of them are read.

B batch, L sequence length, T rows of token-wise work, C model width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu import rounded_up
from .tracing import is_traced


class Packing(NamedTuple):
    """Where the tokens of a batch are. Token-wise work skips padding: x is [T, C], and only attention makes [B, L, C]
    of it. Without padding, or with so little that it does not pay, x is [B, L, C] throughout.

    T is `rounded_up`: the last rows of x may be tokens of padding.
    """

    mask: Tensor | None = None  # [B, L], False at padding; None: there is none
    indices: Tensor | None = None  # [T], of each row of x, into the flattened batch [B L]; None: x is [B, L, C]
    rows: Tensor | None = None  # [B L], the row of x of each token, T at padding that x leaves out
    lengths: list[int] | None = None  # of `longest_first`: tokens of each sequence
    on_the_right: bool = False  # whether padding is known to stand behind each sequence's tokens

    @classmethod
    def of(cls, mask: Tensor, count: int, on_the_right: bool = False) -> "Packing":
        """mask: [B, L], False at padding; count: how many entries are True, so that a GPU need not be asked."""
        # Compiled code is made for one shape, and every batch has another T; only the tests below would be a new one.
        if is_traced():
            return cls(mask)
        if count == mask.numel():
            return NO_PADDING
        if (size := max(1, rounded_up(count))) >= mask.numel():  # one row at least, for `select`
            return cls(mask, on_the_right=on_the_right)
        indices = mask.logical_not().flatten().byte().argsort(stable=True)[:size]  # padding last
        return cls(mask, indices, rows_of(indices, mask), on_the_right=on_the_right)

    def longest_first(self) -> "Packing":
        """The same rows of x, and the longest sequences first."""
        if self.mask is None or self.indices is None:
            return self
        longest = self.mask.size(1)
        lengths, order = (self.mask * torch.arange(1, longest + 1)).amax(1).sort(descending=True, stable=True)
        sequence, column = self.indices // longest, self.indices % longest
        mask, indices = self.mask[order], order.argsort()[sequence] * longest + column
        return Packing(mask, indices, rows_of(indices, mask), lengths=lengths.tolist())

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [T, C]"""
        if self.indices is None:
            return x
        x = x.flatten(0, 1)
        return Pack.apply(x, self.indices, self.rows) if torch.is_grad_enabled() else x.index_select(0, self.indices)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, C] -> [B, L, C], 0 at padding but for the few tokens of it that make T round."""
        if self.mask is None or self.indices is None or self.rows is None:
            return x
        x = Unpack.apply(x, self.indices, self.rows) if torch.is_grad_enabled() else spread(x, self.rows)
        return x.view(*self.mask.shape, -1)

    def zeroed(self, x: Tensor, indices: Tensor) -> Tensor:
        """x [n, C], features of these tokens of the flattened batch, 0 at padding as in `unpack`: an empty sequence has
        no other one's features."""
        if self.indices is None or self.rows is None:
            return x
        return x.masked_fill(self.rows[indices].eq(len(self.indices))[:, None], 0)

    def select(self, output_indices: Tensor, of_attention: "Packing") -> "Selection":
        """output_indices: [n], into the flattened batch [B L]. On a CPU the list is padded to `rounded_up(n)`; drop the
        extra rows. of_attention: the packing in the order in which attention takes sequences."""
        if output_indices.device.type == "cpu":
            output_indices = F.pad(output_indices, (0, rounded_up(len(output_indices)) - len(output_indices)))
        if self.indices is None or self.rows is None or of_attention.indices is None:
            return Selection(output_indices, output_indices)
        rows = self.rows[output_indices].clamp(max=len(self.indices) - 1)  # at padding: any
        return Selection(rows, of_attention.indices[rows])


NO_PADDING = Packing()


def rows_of(indices: Tensor, mask: Tensor) -> Tensor:
    """`Packing.rows` from its indices and mask."""
    rows = torch.full_like(mask, len(indices), dtype=torch.long).flatten()
    return rows.scatter_(0, indices, torch.arange(len(indices), device=mask.device))


class Selection(NamedTuple):
    """The tokens whose features are read: the last layer computes only them from its attention on."""

    rows: Tensor  # [m], of x
    indices: Tensor  # [m], into the flattened batch [B L], sequences in attention's order

    def take_packed(self, x: Tensor) -> Tensor:
        """[T, C] or [B, L, C] -> [m, C]"""
        return x.flatten(0, -2).index_select(0, self.rows)

    def take_padded(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [m, C]"""
        return x.flatten(0, 1).index_select(0, self.indices)


def spread(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, C] -> [B L, C]; a row of zeros wherever `rows` is T."""
    return torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, rows)


class Pack(torch.autograd.Function):
    """Rows by their index. PyTorch's own backward pass adds rows up one by one; here none is selected twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return spread(grad, *ctx.saved_tensors), None, None


class Unpack(torch.autograd.Function):
    """The inverse of `Pack`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        return spread(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None
