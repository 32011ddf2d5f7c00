"""Attention on a CPU, under softmax: a few [L, L] blocks of logits at a time, which stay in a core's cache.

B batch, L sequence length, R queries and K keys (L each, but under a window), H heads, D width of a head, E width of a
value head. docs/dev/kernels.md has the measurement that justifies each trick.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .attention import Batch, mask_logits
from .cpu import DropoutMask, on_onednn, product, rounded_up, select
from .packing import Packing
from .positions import Positions, is_watched
from .token_positions import TokenPositions
from .tracing import is_traced
from .windows import Windowed

BLOCKED_BIAS_FROM = 2048  # longest sequence whose bias is held as a whole in evaluation
QUERY_BLOCK_LOGITS = 2**24  # logits computed at a time by `attention_by_queries`: 64 MiB of float32
KEPT_BYTES = 2**26  # of a model's position terms, in evaluation
KEPT: WeakKeyDictionary[Positions, tuple[list[Tensor], dict[int, Any]]] = WeakKeyDictionary()
OWN = "torch.nn.", f"{__package__}.positions", f"{__package__}.schemes_"  # modules without another state


Rows = Callable[[int, int], Any]  # of a bias: queries first .. last-1 -> [H, last - first, L]


class CpuPrepared(NamedTuple):
    """The result of `Cpu.prepare`: a layer's data beside q, k and v."""

    bias: Tensor | Rows | None  # [H, R, K]; for long sequences without gradients, a function
    mask: Tensor | None  # [B, 1 or H, 1, K], added to the logits: 0, and a very low number at padding
    blocks: "list[Block] | None" = None  # planned for all layers, where sequences are cut to their lengths


class Cpu(Windowed):
    """Padding stays a mask, so that nothing of size B x H x L x L is ever there. Sequences come longest first: cutting
    them to about one length is a view then. Long ones without gradients get their bias a block of queries at a time."""

    name = "blocked"

    def refuses(self, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"it is for CPUs, not for {device.type}"
        return super().refuses(positions, normaliser, device, dtype)

    def order(self, packing: Packing) -> Packing:
        return packing.longest_first()

    def terms(self, positions: Positions, token_positions: TokenPositions) -> list[tuple[Any, Tensor | None]]:
        long = token_positions.length > BLOCKED_BIAS_FROM and positions.has_bias()
        if torch.is_grad_enabled() or positions.training:
            return positions.terms(token_positions)
        if not long:
            return kept_terms(positions, token_positions)

        def rows_of(layer: int) -> Rows:  # [H, L, L] would take too much memory
            return lambda first, last: positions.bias(layer, token_positions.block(first, last))

        return [(rows_of(layer), None) for layer in range(positions.dims.layers)]

    def prepare_whole(
        self, bias: Tensor | Rows | None, gate: Tensor | None, reach: int | None, batch: Batch
    ) -> CpuPrepared:
        if reach is not None:
            bias = without_far(bias, reach, batch)
        lengths, length = batch.packing.lengths, batch.token_positions.length
        blocks = None if lengths is None else plan_blocks(batch.heads, len(lengths), length, length, lengths)
        return CpuPrepared(bias, additive(batch.key_mask), blocks)

    def prepare_chunks(self, bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> CpuPrepared:
        return CpuPrepared(bias, additive(mask))

    def mix_whole(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: CpuPrepared, scale: float,
        dropout: float,
    ) -> tuple[Tensor, None]:  # fmt: skip
        bias, mask, blocks = prepared
        if not isinstance(bias, Tensor):
            is_long = k.size(2) > BLOCKED_BIAS_FROM and not torch.is_grad_enabled() and dropout == 0
            if bias is not None or is_long:
                return attention_by_queries(q, k, v, bias, mask, scale), None
        if blocks is not None and q.size(2) != k.size(2):  # the query [CLS] alone
            blocks = None
        return blocked_attention(q, k, v, bias, mask, scale, dropout, blocks), None


def kept_terms(positions: Positions, token_positions: TokenPositions) -> list[tuple[Any, Tensor | None]]:
    """`Positions.terms` without gradients, of the package's own schemes kept for each length while no weight changes.
    Values are compared, because changes by `weight.data` or numpy leave no other trace."""
    weights, length = [*positions.parameters(), *positions.buffers()], token_positions.length
    plain = all(type(x) in (Tensor, nn.Parameter) for x in (*weights, torch.empty(0)))  # fake ones have no values
    own = all(type(m).__module__.startswith(OWN) and not is_watched(m) for m in positions.modules())
    if not (plain and own and positions.has_bias()) or token_positions.drawn is not None or is_traced():
        return positions.terms(token_positions)
    copies, kept = KEPT.get(positions, ([], {}))
    same = (a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(copies, weights, strict=False))
    if len(copies) != len(weights) or not all(same):
        copies, kept = [weight.detach().clone() for weight in weights], {}
    if length not in kept:
        terms = positions.terms(token_positions)
        kept = {**kept, length: (terms, sum(bias.nbytes for bias in {bias for bias, _ in terms if bias is not None}))}
        while sum(size for _, size in kept.values()) > KEPT_BYTES:
            del kept[next(iter(kept))]  # the oldest
        KEPT[positions] = copies, kept  # as a whole, for other threads
        return terms
    return kept[length][0]


def additive(key_mask: Tensor | None) -> Tensor | None:
    """A mask that is added to logits. Finite: in a window of only padding, all keys are masked."""
    return None if key_mask is None else mask_logits(None, key_mask)


def without_far(bias: Tensor | Rows | None, reach: int, batch: Batch) -> Tensor | Rows:
    """A bias as `CpuPrepared` has it, and a very low number at keys that a query does not see under a window."""
    if bias is None or isinstance(bias, Tensor):
        return mask_logits(bias, batch.near(reach))
    block = batch.token_positions.block
    return lambda first, last: mask_logits(bias(first, last), batch.near(reach, block(first, last)))


# torch.compiler.disable imports the whole compiler, which takes as long as torch itself; torch's own form of it does so
# at the first call.
Function = TypeVar("Function", bound=Callable[..., Any])
not_compiled: Callable[[Function], Function] = getattr(torch, "_disable_dynamo", torch.compiler.disable)


BLOCK_LOGITS = 2**18  # logits computed at a time: 1 MiB of float32, which stays in a core's cache
SAVE_WEIGHTS_UP_TO = 512  # longest sequence whose float32 weights are saved for the backward pass


def saves_weights(k: Tensor) -> bool:
    """Whether the forward pass saves the weights: if they are small, that is cheaper than computing them again."""
    return k.dtype != torch.float32 or k.size(2) <= SAVE_WEIGHTS_UP_TO


class Block(NamedTuple):
    """Some of the logits of attention, which are computed together."""

    heads: slice
    rows: slice  # of the batch
    length: int | None  # to which its sequences are cut, if they are
    shape: tuple[int, int, int, int]  # heads, rows, queries, keys

    def cut(self, x: Tensor) -> Tensor:
        """This block's part of x [B, H, L, D]: [h, r, queries or keys, D]."""
        return x[self.rows, self.heads, : self.length].transpose(0, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """The inverse of `cut`."""
        x[self.rows, self.heads, : self.length] = values.transpose(0, 1)


def by_block(x: Tensor | None, blocks: list[Block]) -> list[Any]:
    """Each block's part [h, r, queries, keys] of x, which has one entry per weight of all blocks; None of None."""
    if x is None:
        return [None] * len(blocks)
    parts = x.split([math.prod(block.shape) for block in blocks])
    return [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]


class BlockedAttention(torch.autograd.Function):
    """softmax(q . k * scale + bias + mask), dropout, times v, a few [L, L] blocks at a time (see `plan_blocks`). The
    blocks cut off queries of padding, which get 0.

    The backward pass needs dropout's mask, one byte per weight, and the weights: saved in v's precision if
    `saves_weights`, else computed again. It adds up the gradient of the bias over the batch block by block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        scale: float,
        p: float,
        blocks: list[Block],
    ) -> Tensor:
        batch, heads, queries, _ = q.shape
        count = sum(math.prod(block.shape) for block in blocks)
        dropout_mask = DropoutMask(p) if p > 0 else None
        ctx.scale, ctx.dropout_scale = scale, dropout_mask.scale if dropout_mask else 1.0
        ctx.blocks = blocks
        kept = torch.empty(count, dtype=torch.bool) if dropout_mask else None
        saved = v.new_empty(count) if any(ctx.needs_input_grad) and saves_weights(k) else None
        ctx.save_for_backward(q, k, v, bias, mask, kept, saved)
        make = q.new_zeros if blocks[0].length else q.new_empty  # what is cut off is padding
        out = make(batch, queries, heads, v.size(-1)).transpose(1, 2)
        for block, own_kept, own_saved in zip(blocks, by_block(kept, blocks), by_block(saved, blocks), strict=True):
            weights = block_weights(q, k, bias, mask, scale, block)
            weights = weights.to(v.dtype) if saved is None else own_saved.copy_(weights)
            if dropout_mask:
                weights = select(weights, dropout_mask.draw(own_kept))
            block.put(out, matmul(weights, block.cut(v).transpose(2, 3)).mul_(ctx.dropout_scale))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, kept, saved = ctx.saved_tensors
        blocks = ctx.blocks
        make = torch.zeros_like if blocks[0].length else torch.empty_like
        dq, dk, dv = (make(x) for x in (q, k, v))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for block, own_kept, weights in zip(blocks, by_block(kept, blocks), by_block(saved, blocks), strict=True):
            if saved is None:
                weights = block_weights(q, k, bias, mask, ctx.scale, block).to(v.dtype)
            g = block.cut(grad) * ctx.dropout_scale
            dweights, dropped = matmul(g, block.cut(v)), weights
            if kept is not None:
                dweights, dropped = (select(x, own_kept) for x in (dweights, weights))
            block.put(dv, transposed_matmul(dropped, g))
            dlogits = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
            if dbias is not None:
                summed = dlogits[:, 0] if dlogits.size(1) == 1 else dlogits.sum(1, dtype=torch.float32)
                dbias[block.heads, : summed.size(1), : summed.size(2)] += summed
            block.put(dq, matmul(dlogits, block.cut(k).transpose(2, 3)).mul_(ctx.scale))
            block.put(dk, transposed_matmul(dlogits, block.cut(q)).mul_(ctx.scale))
        return dq, dk, dv, dbias, None, None, None, None


CUT_IF_BELOW = 0.9  # share of the logits below which cutting sequences to their lengths pays


def plan_blocks(heads: int, batch: int, queries: int, keys: int, lengths: list[int] | None = None) -> list[Block]:
    """The blocks of all logits, or, where cutting them to `lengths` pays, of those that matter. lengths: of every
    sequence, up to its last token that is not padding, falling, or None; queries and keys are the same tokens then."""
    if lengths is not None:
        cut = by_length(heads, lengths, keys)
        if sum(math.prod(block.shape) for block in cut) < CUT_IF_BELOW * batch * heads * queries * keys:
            return cut
    # One head after the other, so that its bias stays in the cache. Where sequences are short, calls take longer than
    # products: then a block holds several heads of the whole batch.
    step = max(1, BLOCK_LOGITS // (queries * keys))  # sequences in a block
    return [
        Block(hs, rows, None, (hs.stop - hs.start, rows.stop - rows.start, queries, keys))
        for hs in slices(heads, max(1, step // batch))
        for rows in slices(batch, step)
    ]


MIN_BLOCK_LOGITS = 2**15  # logits of a block that take longer than the calls for it
SAME_BLOCK_RATIO = 0.75  # a sequence shorter than this share of a block's longest one goes into another block


def by_length(heads: int, lengths: list[int], longest: int) -> list[Block]:
    """Blocks of sequences of about the same length, which are cut to the longest of them; as many as make one block of
    all heads."""
    blocks: list[Block] = []
    first = 0
    while first < len(lengths):
        n = min(rounded_up(max(1, lengths[first])), longest)
        fewest, most = (max(1, logits // (heads * n * n)) for logits in (MIN_BLOCK_LOGITS, BLOCK_LOGITS))
        last = min(first + fewest, len(lengths))
        while last < min(first + most, len(lengths)) and lengths[last] > SAME_BLOCK_RATIO * n:
            last += 1
        together = max(1, BLOCK_LOGITS // ((last - first) * n * n))  # heads in a block
        blocks += [
            Block(hs, slice(first, last), n, (hs.stop - hs.start, last - first, n, n)) for hs in slices(heads, together)
        ]
        first = last
    return blocks


def slices(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def of_heads(x: Tensor, heads: slice) -> Tensor:
    """These heads of x [H, ...]; all of x if it is the same for all heads, [1, ...]."""
    return x if len(x) == 1 else x[heads]


def block_weights(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, block: Block) -> Tensor:
    """[h, r, queries, keys] float32: the weights of a block."""
    # adding float32 to bf16 would take 25 times as long
    logits = matmul(block.cut(q) * scale, block.cut(k)).float()
    queries, keys = logits.shape[2:]
    if bias is not None:
        logits += of_heads(bias[:, None, :queries, :keys], block.heads)
    if mask is not None:
        logits += of_heads(mask[block.rows, ..., :keys].transpose(0, 1), block.heads)
    return torch.softmax(logits, -1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [h, r, n, k] times the transpose of b [h, r, m, k]: [h, r, n, m]."""
    if a.size(0) * a.size(1) == 1 and on_onednn(a, b):
        return product(a[0, 0], b[0, 0])[None, None]
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1).transpose(1, 2)).unflatten(0, a.shape[:2])


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [h, r, m, n] times b [h, r, m, k]: [h, r, n, k]. Computed as (b^T a)^T, in two thirds of the
    time."""
    return matmul(b.transpose(2, 3), a.transpose(2, 3)).transpose(2, 3)


def no_autocast() -> AbstractContextManager[None]:
    """Autocast off, where it is on."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


@not_compiled  # its loops and numpy's masks cannot be traced
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, p: float,
    blocks: list[Block] | None = None,
) -> Tensor:  # fmt: skip
    """`BlockedAttention` of q [B, H, R, D], k [B, H, K, D], v [B, H, K, E], bias [H, R, K] or None, and the additive
    mask [B, 1 or H, 1, K] or None -> [B, H, R, E]. p: probability of dropout. blocks: of `plan_blocks`, if they are
    planned already.

    A window of n chunks (`windows.Chunks`) is laid out as H n heads. R and K are L, but in a window.
    """
    if q.size(0) == 0:  # no sequences
        return q.new_empty(*q.shape[:3], v.size(-1))
    with no_autocast():
        blocks = blocks or plan_blocks(q.size(1), q.size(0), q.size(2), k.size(2))
        if len(blocks) == 1 and not (p or torch.is_grad_enabled() or blocks[0].length):
            # for one short text, calls take longer than products
            weights = block_weights(q, k, bias, mask, scale, blocks[0]).to(v.dtype)
            return matmul(weights, blocks[0].cut(v).transpose(2, 3)).transpose(0, 1)
        return BlockedAttention.apply(q, k, v, bias, mask, scale, p, blocks)


def attention_by_queries(
    q: Tensor, k: Tensor, v: Tensor, bias: Rows | None, mask: Tensor | None, scale: float
) -> Tensor:  # fmt: skip
    """softmax(q . k * scale + bias) v on a CPU, a block of queries at a time, without gradients and dropout: neither
    logits nor bias of all pairs are ever there.

    q, k [B, H, L, D], v [B, H, L, E], bias: queries first .. last-1 -> [H, last - first, L], or None; the additive mask
    [B, 1, 1, L] or None -> [B, H, L, E].
    """
    batch, heads, length, _ = q.shape
    step = max(1, QUERY_BLOCK_LOGITS // (batch * heads * length))
    out = q.new_empty(batch, length, heads, v.size(-1)).transpose(1, 2)
    with no_autocast():
        for first in range(0, length, step):
            last = min(first + step, length)
            logits = ((q[:, :, first:last] * scale) @ k.transpose(2, 3)).float()
            if bias is not None and (rows := bias(first, last)) is not None:
                logits += rows
            if mask is not None:
                logits += mask
            out[:, :, first:last] = torch.softmax(logits, -1).to(v.dtype) @ v
    return out
