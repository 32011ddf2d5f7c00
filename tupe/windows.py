"""Local attention on the fast backends: each query sees the keys within a distance, and the others are not computed.

B batch, L sequence length, H heads, D width of a head; r reach, the largest distance; n chunks of c queries each. The
K = c + 2r keys of a chunk are its own and r on each side; one more, the last, if [CLS] is seen from everywhere.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Backend, Batch
from .token_positions import TokenPositions
from .tracing import is_traced


class Chunks:
    """Chunks of queries with the keys that they see. They are laid out as heads, [B, H n, c, D] and [B, H n, K, D], so
    that any kernel for attention without windows computes them."""

    def __init__(self, positions: TokenPositions, reach: int, from_cls: bool):
        """reach: largest difference of positions. from_cls: whether all tokens see [CLS], the first (which itself sees
        all: that is up to the caller)."""
        self.positions, self.reach, self.from_cls, self.length = positions, reach, from_cls, positions.length
        self.chunk = max(reach, CHUNK)
        self.chunks = -(-self.length // self.chunk)
        self.keys = self.chunk + 2 * reach

    @property
    def pays(self) -> bool:
        """Whether chunks have fewer keys than the sequence."""
        return self.keys + self.from_cls < self.length

    def seen(self) -> Tensor:
        """[n, c, K], whether a query sees a key. Positions increase by 1 or more, but for columns of padding, so
        that no key farther away in the sequence than `reach` is near."""
        index, device = self.positions.index, self.positions.device
        starts = torch.arange(self.chunks, device=device)[:, None] * self.chunk
        query = (starts + torch.arange(self.chunk, device=device))[:, :, None]  # [n, c, 1]
        key = (starts - self.reach + torch.arange(self.keys, device=device))[:, None]  # [n, 1, K]
        last = self.length - 1
        near = (index[key.clamp(0, last)] - index[query.clamp(max=last)]).abs() <= self.reach
        near &= (key >= int(self.from_cls)) & (key <= last)
        near = F.pad(near, (0, int(self.from_cls)), value=True)
        return near | (query > last)  # padding of the last chunk sees any key: with none, softmax gives NaN

    def split_queries(self, x: Tensor) -> Tensor:
        """[B, H, L, D] -> [B, H n, c, D]"""
        x = F.pad(x, (0, 0, 0, self.chunks * self.chunk - self.length))
        return x.unflatten(2, (self.chunks, self.chunk)).flatten(1, 2)

    def split_keys(self, x: Tensor) -> Tensor:
        """[B, H, L, D] -> [B, H n, K, D]"""
        after = self.chunks * self.chunk - self.length + self.reach
        pieces = F.pad(x, (0, 0, self.reach, after)).unfold(2, self.keys, self.chunk)  # [B, H, n, D, K]
        pieces = pieces.transpose(3, 4)
        if self.from_cls:
            pieces = torch.cat([pieces, x[:, :, None, :1].expand(-1, -1, self.chunks, -1, -1)], dim=3)
        return pieces.flatten(1, 2)

    def join(self, out: Tensor) -> Tensor:
        """[B, H n, c, E] -> [B, H, L, E]"""
        return out.unflatten(1, (-1, self.chunks)).flatten(2, 3)[:, :, : self.length]

    def split_mask(self, mask: Tensor, heads: int) -> Tensor:
        """[B, 1, 1, L], False at padded keys -> [B, H n, 1, K]"""
        return self.split_keys(mask.transpose(2, 3)).transpose(2, 3).repeat(1, heads, 1, 1)

    def split_bias(self, bias: Tensor | None, heads: int) -> Tensor:
        """[H, L, L], or None for 0 -> [H n, c, K]; -inf at keys that are not seen."""
        seen = self.seen()
        if bias is None:
            return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -math.inf).repeat(heads, 1, 1)
        pieces = []
        for number, block in enumerate(bias.split(self.chunk, dim=1)):  # [H, c, L], in the last chunk fewer queries
            first = number * self.chunk
            whole = F.pad(block, (self.reach, self.keys, 0, self.chunk - block.size(1)))
            piece = whole[:, :, first : first + self.keys]  # [H, c, K]
            pieces.append(torch.cat([piece, whole[:, :, self.reach, None]], dim=2) if self.from_cls else piece)
        return torch.stack(pieces, dim=1).masked_fill(~seen, -math.inf).flatten(0, 1)


CHUNK = 128  # fewest queries of a chunk: with fewer, keys and values are copied more often than it saves


class InChunks(NamedTuple):
    """The result of `Windowed.prepare` for a layer whose window saves work."""

    window: Chunks
    near: Any  # what the backend prepared of the chunks
    of_cls: Any = None  # and of the query [CLS], if it sees all keys


class Windowed(Backend):
    """A backend that computes, under a window that saves work, only the pairs that see each other: in chunks."""

    def prepare_whole(self, bias: Any, gate: Tensor | None, reach: int | None, batch: Batch) -> Any:
        """As `Backend.prepare`: whatever `mix_whole` needs where all pairs are computed."""
        raise NotImplementedError

    def prepare_chunks(self, bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Any:
        """Whatever `mix_whole` needs for a window's n chunks: bias [H n, c, K], mask [B, H n, 1, K] or None."""
        raise NotImplementedError

    def mix_whole(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Any, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """As `Backend.mix`."""
        raise NotImplementedError

    def prepare(self, bias: Any, gate: Tensor | None, reach: int | None, batch: Batch) -> Any:
        window = None if reach is None else Chunks(batch.token_positions, reach, batch.untie_cls)
        # A bias that is a function is made a few queries at a time: all their pairs are computed.
        if window is None or is_traced() or callable(bias) or not window.pays:
            return self.prepare_whole(bias, gate, reach, batch)
        mask, of_cls = batch.key_mask, None
        mask = None if mask is None else window.split_mask(mask, batch.heads)
        near = self.prepare_chunks(window.split_bias(bias, batch.heads), mask, batch.dtype)
        if batch.untie_cls:
            of_cls = self.prepare_whole(None if bias is None else bias[:, :1], None, None, batch)
        return InChunks(window, near, of_cls)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Any, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(prepared, InChunks):
            return self.mix_whole(q, k, v, content, prepared, scale, dropout)
        window = prepared.window
        pieces = window.split_queries(q), window.split_keys(k), window.split_keys(v)
        out = window.join(self.mix_whole(*pieces, None, prepared.near, scale, dropout)[0])
        if prepared.of_cls is not None:
            of_cls, _ = self.mix_whole(q[:, :, :1], k, v, None, prepared.of_cls, scale, dropout)
            out = torch.cat([of_cls, out[:, :, 1:]], dim=2)
        return out, None
