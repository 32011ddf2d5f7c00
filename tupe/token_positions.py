"""The positions of the tokens of a sequence, and functions that bring values by offset to all pairs of tokens.

L sequence length, R number of queries (L, but in a block of them), S span: offsets are -(S-1) .. S-1. The offset of key
j from query i is the position of j minus the position of i. Position 0 is [CLS].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .tracing import is_exported, is_traced

SAMPLINGS = ("consecutive", "random", "shifted")  # see `draw_positions`


class TokenPositions:
    """The positions of L tokens: 0 .. L-1, or others that increase, such as a random subset of a longer range. Only
    columns of padding may repeat the last one.

    drawn: [L] integers below `span`; None means 0 .. L-1, which is faster. Schemes compute what depends on offsets
    once for each of `offsets`, and these methods bring it to all pairs.
    """

    def __init__(
        self, length: int, device: torch.device | str = "cpu", drawn: Tensor | None = None, span: int | None = None
    ):
        self.length, self.drawn = length, drawn
        self.device = torch.device(device) if drawn is None else drawn.device
        self.span: int = length if drawn is None or span is None else span
        self.first, self.last = 0, length  # the queries are tokens first .. last-1
        self.whole: TokenPositions | None = None  # of which these are a block
        self.kept: tuple[Any, Any] = (None, None)  # see `once`

    def block(self, first: int, last: int) -> "TokenPositions":
        """The same keys, but only the queries first .. last-1."""
        block = TokenPositions(self.length, self.device, self.drawn, self.span)
        block.first, block.last, block.whole = first, last, self
        return block

    def once(self, scheme: Any, compute: Callable[[], Any]) -> Any:
        """What a scheme computes of all tokens: once for all blocks that follow one another."""
        if self.whole is None:
            return compute()
        if self.whole.kept[0] is not scheme:
            self.whole.kept = scheme, compute()
        return self.whole.kept[1]

    @property
    def index(self) -> Tensor:
        """[L], the positions."""
        return torch.arange(self.length, device=self.device) if self.drawn is None else self.drawn

    @property
    def queries(self) -> Tensor:
        """[R], the positions of the queries."""
        return self.index[self.first : self.last]

    @property
    def offsets(self) -> Tensor:
        """[2S - 1], all offsets that can occur, in increasing order."""
        return torch.arange(1 - self.span, self.span, device=self.device)

    @property
    def by_index(self) -> bool:
        """Whether pairs are looked up: the faster ways would make the length a constant of traced code."""
        return self.drawn is not None or is_traced()

    @property
    def pairs(self) -> Tensor:
        """[R, L], the place in `offsets` of each key's offset from each query."""
        return self.index - self.queries[:, None] + self.span - 1

    def near(self, reach: int) -> Tensor:
        """[R, L], whether a key is at most `reach` away from a query."""
        return (self.index - self.queries[:, None]).abs() <= reach

    def spread(self, by_offset: Tensor) -> Tensor:
        """[..., 2S - 1] values of `offsets` -> [..., R, L], the value of every pair."""
        if not self.by_index:
            return toeplitz(by_offset, self.length, self.first, self.last)
        pairs = self.pairs
        return by_offset.index_select(-1, pairs.flatten()).view(*by_offset.shape[:-1], *pairs.shape)

    def select(self, x: Tensor) -> Tensor:
        """[..., L, 2S - 1], each query's values by offset -> [..., L, L], entry (i, j) is x[i] at the offset of j."""
        if not self.by_index:
            return skew(x)
        pairs = self.pairs
        if is_exported():  # torch.jit.trace takes the batch of `expand` for a constant
            return x.gather(-1, pairs + torch.zeros_like(x[..., : self.length], dtype=pairs.dtype))
        return x.gather(-1, pairs.expand(*x.shape[:-2], -1, -1))

    def collect(self, x: Tensor) -> Tensor:
        """Inverse of `select`: [..., L, L] -> [..., L, 2S - 1], 0 at offsets that do not occur in a row."""
        if not self.by_index:
            return unskew(x)
        empty = x.new_zeros(*x.shape[:-1], 2 * self.span - 1)
        # added: columns of padding repeat a position, with weights of 0
        return empty.scatter_add(-1, self.pairs.expand(*x.shape[:-2], -1, -1), x)


def draw_positions(
    length: int, span: int, kind: str, device: torch.device | str = "cpu", padding: int = 0
) -> TokenPositions:
    """Random positions for training, [CLS] at 0. padding: columns behind the `length` tokens, which repeat the last
    position. Raises ValueError if the tokens do not fit into `span` positions.

    kind: "random", a sorted random subset of 1 .. span-1 (Ruoss et al., 2023), from which encodings of short sequences
    learn large distances; "shifted", consecutive positions from a random one on (SHAPE: Kiyono et al., 2021), where
    only the offsets from and to [CLS] are random.
    """
    if length > span:
        raise ValueError(f"a sequence of {length} tokens exceeds the limit of {span} positions")
    if kind == "random":
        others = 1 + torch.randperm(span - 1, device=device)[: length - 1].sort().values
    else:
        start = torch.randint(1, span - length + 2, (), device=device)
        others = start + torch.arange(length - 1, device=device)
    drawn = F.pad(others, (1, 0))
    return TokenPositions(length + padding, device, torch.cat([drawn, drawn[-1:].expand(padding)]), span)


def toeplitz(by_offset: Tensor, length: int, first: int = 0, last: int | None = None) -> Tensor:
    """[..., 2L - 1] values for offsets -(L-1) .. L-1 -> [..., L, L] with entry (i, j) = value of offset j - i, or only
    its rows first .. last-1."""
    # contiguous: else the memory order of a table, [2L - 1, H], would make every later pass over one head strided
    rows = by_offset.contiguous().unfold(-1, length, 1)  # a view, last query first
    return rows[..., length - (last or length) : length - first, :].flip(-2)


def skew(x: Tensor) -> Tensor:
    """[..., L, 2L - 1], row i by offset -(L-1) .. L-1 -> [..., L, L] with entry (i, j) = x[i] at offset j - i."""
    length = x.size(-2)
    if length == 1:
        return x
    # flat index of entry (i, j): i (2L - 1) + j - i + L - 1 = i (2L - 2) + j + (L - 1)
    flat = x.flatten(-2)[..., length - 1 :][..., : length * (2 * length - 2)]
    return flat.unflatten(-1, (length, 2 * length - 2))[..., :length]


def unskew(x: Tensor) -> Tensor:
    """Inverse of `skew`: [..., L, L] -> [..., L, 2L - 1], 0 at offsets that do not occur in a row."""
    length = x.size(-2)
    if length == 1:
        return x
    flat = F.pad(F.pad(x, (0, length - 2)).flatten(-2), (length - 1, 1))
    return flat.unflatten(-1, (length, 2 * length - 1))
