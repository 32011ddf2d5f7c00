"""Faster versions of PyTorch functions: a float32 product, dropout, attention and the masked-LM loss.

B batch, L sequence length, R queries and K keys of attention (L each, but under a window), T rows of token-wise work,
H heads, D width of a head, C model width, V vocabulary. Tests compare each with its plain counterpart, and
docs/performance.md has the measurement that justifies it.
"""

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint


def is_amd() -> bool:
    """Whether this machine's processor is one of AMD's."""
    cpu = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpu.read_text() if cpu.exists() else platform.processor())


# In float32 on a CPU, PyTorch multiplies with MKL, which uses only half the width of an AMD processor's vector units.
# oneDNN uses all of it; it is part of PyTorch too, which calls it for bfloat16 only. On Intel's, MKL is the faster one.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ONEDNN = HAS_ONEDNN and is_amd()

# torch.compiler.disable imports the whole compiler, which takes as long as torch itself; torch's own form of it does so
# at the first call.
not_compiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times the transpose of b [m, k], plus bias [m]: [n, m], all float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(dense(a), dense(b), bias, "none", [], "")


def dense(x: Tensor) -> Tensor:
    """A copy of the matrix if there are gaps between its rows or columns: there oneDNN is a thousand times slower."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def on_onednn(*tensors) -> bool:
    """Whether `product` can multiply these tensors; it refuses empty ones."""
    return ONEDNN and all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in tensors)


def rounded_up(rows: int) -> int:
    """A number of rows, raised by at most a sixteenth, so that only 17 numbers remain between one power of 2 and the
    next.

    oneDNN caches a kernel for every shape, and these fragment the memory: since every batch has another number of
    tokens, and of masked ones, a process would grow by gigabytes.
    """
    step = max(1, 2 ** (rows.bit_length() - 5))
    return rows + -rows % step


def padded(x: Tensor) -> Tensor:
    """x [n, k] with rows of zeros appended: `rounded_up` of them in all."""
    more = rounded_up(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, more)) if more else x


def product_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` of x [n, k], which is `padded` for it: [n, m]."""
    return product(padded(x), weight, bias)[: len(x)]


def product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [n, m] times b [n, k]: [m, k], as a weight's gradient is. oneDNN copies a first matrix that is
    transposed; so that one goes first whose copy is smaller, with that of the result, if it has to be transposed."""
    if not on_onednn(a, b):
        return a.t() @ b
    (n, m), k = a.shape, b.size(1)
    if m * n <= k * n + m * k:
        return product(a.t(), b.t())
    return product(b.t(), a.t()).t().contiguous()


class OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_of_rows(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        padded_grad = padded(grad)
        return (
            product(padded_grad, weight.t())[: len(x)] if needs_x else None,
            product_over_rows(padded_grad, padded(x)) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def autocast_device(device: str) -> str:
    """The kind of device whose autocast setting applies on `device`: the meta device, which only has shapes, has no
    setting of its own."""
    return "cpu" if device == "meta" else device


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with oneDNN in float32 on a CPU: x [..., C], weight [K, C], bias [K] -> [..., K]."""
    if torch.compiler.is_compiling() or not on_onednn(x, weight) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.size(-1))
    y = OneDnnLinear.apply(rows, weight, bias) if torch.is_grad_enabled() else product_of_rows(rows, weight, bias)
    return y.view(*x.shape[:-1], len(weight))


class Linear(torch.nn.Linear):
    """`nn.Linear` on the function `linear` above."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class DropoutMask:
    """Random masks for dropout on a CPU: 16 random bits per entry, so that the probability p is met to 2^-17.

    PyTorch draws its masks on one core from a slow generator, which takes longer than the products around it. The
    generator here is seeded by PyTorch's, so that one seed still determines everything.
    """

    def __init__(self, p: float):
        dropped = min(round(p * 2**16), 2**16 - 1)
        self.threshold = dropped - 2**15
        self.scale = 2**16 / (2**16 - dropped)  # factor of the entries that are kept
        self.generator = np.random.SFC64(int(torch.randint(2**62, ())))

    def draw(self, out: Tensor) -> Tensor:
        """Fill the contiguous bool tensor `out`: True for entries to keep."""
        words = self.generator.random_raw(-(-out.numel() // 4)).view(np.int16)  # 64 bits make four entries
        np.greater_equal(words[: out.numel()], self.threshold, out=out.view(-1).numpy())
        return out


def select(x: Tensor, kept: Tensor) -> Tensor:
    """x where the bool tensor `kept` is True, 0 elsewhere. Bitwise: PyTorch multiplies floats by bools slowly."""
    integer = INTEGERS[x.element_size()]
    bits = kept.view(torch.int8).to(integer).neg_()  # all ones or all zeros
    return bits.bitwise_and_(x.view(integer)).view(x.dtype)


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, p: float) -> Tensor:
        dropout_mask = DropoutMask(p)
        ctx.scale = dropout_mask.scale
        kept = dropout_mask.draw(torch.empty(x.shape, dtype=torch.bool))
        ctx.save_for_backward(kept)
        return select(x, kept).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return select(grad, kept).mul_(ctx.scale), None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`F.dropout`, several times as fast on a CPU."""
    if not training or not 0 < p < 1 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    return Dropout.apply(x, p)


class SplitHeads(torch.autograd.Function):
    """[B, L, 3 C] -> q, k, v [B, H, L, D]; the backward pass makes one copy where PyTorch makes two."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads) -> tuple[Tensor, None]:
        batch, heads, length, width = grads[0].shape
        out = grads[0].new_empty(batch, length, 3, heads, width)
        for i, grad in enumerate(grads):
            out[:, :, i] = grad.transpose(1, 2)
        return out.flatten(2), None


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, L, D] of their joint projection x [B, L, 3 C]."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return SplitHeads.apply(x, heads)


BLOCK = 2**18  # logits computed at a time: 1 MiB of float32, which stays in a core's cache
SHORT = 512  # longest sequence whose float32 weights are saved for the backward pass


def saves_weights(k: Tensor) -> bool:
    """Whether the forward pass saves the weights: if they are small, that is cheaper than computing them again."""
    return k.dtype != torch.float32 or k.size(2) <= SHORT


class Block(NamedTuple):
    """Some of the logits of attention, which are computed together."""

    heads: slice
    rows: slice  # of the batch
    length: int | None  # to which its sequences are cut, if they are
    shape: tuple[int, int, int, int]  # heads, rows, queries, keys
    first: int  # where its weights begin among those of all blocks

    def cut(self, x: Tensor) -> Tensor:
        """Of x [B, H, L, D], this block's part: [h, r, queries or keys, D]."""
        return x[self.rows, self.heads, : self.length].transpose(0, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """The inverse of `cut`."""
        x[self.rows, self.heads, : self.length] = values.transpose(0, 1)

    def weights(self, x: Tensor) -> Tensor:
        """Of x, one entry per weight of all blocks, this block's [h, r, queries, keys]."""
        return x[self.first : self.first + math.prod(self.shape)].view(self.shape)


class BlockedAttention(torch.autograd.Function):
    """softmax(q . k * scale + bias + mask), dropout, times v, a few [L, L] blocks at a time (see `plan_blocks`). What
    they cut off, queries of padding, is 0.

    The backward pass needs dropout's mask, one byte per weight, and the weights: saved in v's precision if
    `saves_weights`, else computed again. It adds up the gradient of the bias over the batch block by block.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
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
        for block in blocks:
            weights = block_weights(q, k, bias, mask, scale, block)
            weights = weights.to(v.dtype) if saved is None else block.weights(saved).copy_(weights)
            if dropout_mask:
                weights = select(weights, dropout_mask.draw(block.weights(kept)))
            block.put(out, matmul(weights, block.cut(v).transpose(2, 3)).mul_(ctx.dropout_scale))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, kept, saved = ctx.saved_tensors
        make = torch.zeros_like if ctx.blocks[0].length else torch.empty_like
        dq, dk, dv = (make(x) for x in (q, k, v))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for block in ctx.blocks:
            if saved is None:
                weights = block_weights(q, k, bias, mask, ctx.scale, block).to(v.dtype)
            else:
                weights = block.weights(saved)
            g = block.cut(grad) * ctx.dropout_scale
            dweights, dropped = matmul(g, block.cut(v)), weights
            if kept is not None:
                dweights, dropped = (select(x, block.weights(kept)) for x in (dweights, weights))
            block.put(dv, transposed_matmul(dropped, g))
            dlogits = softmax_backward(dweights, weights)
            if dbias is not None:
                part = dlogits[:, 0] if dlogits.size(1) == 1 else dlogits.sum(1, dtype=torch.float32)
                add_cyclic(dbias[:, : part.size(1), : part.size(2)], block.heads, part)
            block.put(dq, matmul(dlogits, block.cut(k).transpose(2, 3)).mul_(ctx.scale))
            block.put(dk, transposed_matmul(dlogits, block.cut(q)).mul_(ctx.scale))
        return dq, dk, dv, dbias, None, None, None, None


CUT = 0.9  # share of the logits below which cutting sequences to their lengths pays


def plan_blocks(heads: int, batch: int, queries: int, keys: int, lengths: list[int] | None = None) -> list[Block]:
    """The blocks of all logits, or, where cutting them to `lengths` pays, of those that matter. lengths: of every
    sequence, up to its last token that is not padding, falling, or None; queries and keys are the same tokens then."""
    parts = whole_sequences(heads, batch, queries, keys)
    if lengths is not None:
        cut = by_length(heads, lengths, keys)
        if sum(math.prod(shape) for *_, shape in cut) < CUT * batch * heads * queries * keys:
            parts = cut
    blocks, first = [], 0
    for part in parts:
        blocks.append(Block(*part, first))
        first += math.prod(blocks[-1].shape)
    return blocks


def whole_sequences(heads: int, batch: int, queries: int, keys: int) -> list[tuple]:
    """One head after the other, so that its bias stays in the cache, or as many at a time as make one block of the
    whole batch: where sequences are short, calls take longer than products."""
    step = max(1, BLOCK // (queries * keys))  # sequences in a block
    return [
        (hs, rows, None, (hs.stop - hs.start, rows.stop - rows.start, queries, keys))
        for hs in slices(heads, max(1, step // batch))
        for rows in slices(batch, step)
    ]


LEAST = 2**15  # logits of a block that take longer than the calls for it
SHORTER = 0.75  # of the longest sequence of a block: what is shorter is worth a block of its own


def by_length(heads: int, lengths: list[int], longest: int) -> list[tuple]:
    """Sequences of about one length together, which are cut to the longest of them, as many as make one block of all
    heads."""
    parts, first = [], 0
    while first < len(lengths):
        n = min(rounded_up(max(1, lengths[first])), longest)
        fewest, most = (max(1, logits // (heads * n * n)) for logits in (LEAST, BLOCK))
        last = min(first + fewest, len(lengths))
        while last < min(first + most, len(lengths)) and lengths[last] > SHORTER * n:
            last += 1
        together = max(1, BLOCK // ((last - first) * n * n))  # heads in a block
        parts += [
            (hs, slice(first, last), n, (hs.stop - hs.start, last - first, n, n)) for hs in slices(heads, together)
        ]
        first = last
    return parts


def slices(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def cyclic(x: Tensor, hs: slice) -> Tensor:
    """Of x [n, ...], which stands for x[h % n] at every head h: x at these heads, or all of x if n is 1."""
    if len(x) == 1:
        return x
    if hs.stop <= len(x):
        return x[hs]
    return x[torch.arange(hs.start, hs.stop) % len(x)]


def add_cyclic(x: Tensor, hs: slice, values: Tensor) -> None:
    """Add values [hs, ...] to x [n, ...], that of head h to x[h % n]."""
    if hs.stop <= len(x):
        x[hs] += values
    else:
        x.index_add_(0, torch.arange(hs.start, hs.stop) % len(x), values.to(x.dtype))


def block_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, block: Block
) -> Tensor:
    """[h, r, queries, keys] float32: the weights of a block."""
    # adding float32 to bf16 would take 25 times as long
    logits = matmul(block.cut(q) * scale, block.cut(k)).float()
    queries, keys = logits.shape[2:]
    if bias is not None:
        logits += cyclic(bias[:, :queries, :keys], block.heads)[:, None]
    if mask is not None:
        logits += cyclic(mask[block.rows, ..., :keys].transpose(0, 1), block.heads)
    return torch.softmax(logits, -1)


FUSED_SOFTMAX_BACKWARD = getattr(torch, "_softmax_backward_data", None)  # private: there is a plain way below


def softmax_backward(dweights: Tensor, weights: Tensor) -> Tensor:
    """The gradient of softmax's logits from that of its weights, [..., L] both: w (dw - sum(dw w))."""
    if FUSED_SOFTMAX_BACKWARD is not None:
        return FUSED_SOFTMAX_BACKWARD(dweights, weights, -1, weights.dtype)
    products = dweights.float() * weights.float()
    return (products - weights.float() * products.sum(-1, keepdim=True)).to(weights.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [h, r, n, k] times the transpose of b [h, r, m, k]: [h, r, n, m]."""
    if a.size(0) * a.size(1) == 1 and on_onednn(a, b):
        return product(a[0, 0], b[0, 0])[None, None]
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1).transpose(1, 2)).unflatten(0, a.shape[:2])


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [h, r, m, n] times b [h, r, m, k]: [h, r, n, k]. Computed as (b^T a)^T, in two thirds of the
    time."""
    return matmul(b.transpose(2, 3), a.transpose(2, 3)).transpose(2, 3)


@not_compiled  # its loops and numpy's masks cannot be traced
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, real: Tensor | None, scale: float, p: float,
    lengths: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """`BlockedAttention` of q [B, H, R, D], k [B, H, K, D], v [B, H, K, E], bias [H, R, K] or None, and real
    [B, 1, 1, K] or None (False at padded keys) -> [B, H, R, E]. p: probability of dropout. lengths: see
    `plan_blocks`.

    Of n chunks of a window (`windows.Chunks`), laid out as H n heads, bias is [H n, R, K], or [n, R, K] for all heads
    alike, and real [B, n, 1, K]. R and K are L, but in a window.
    """
    if p >= 1:
        return (q[..., :1] * 0).expand(*q.shape[:3], v.size(-1))
    # finite: in a window of padding alone, all keys are masked
    mask = None if real is None else torch.zeros(real.shape).masked_fill_(~real, torch.finfo(torch.float32).min)
    with torch.autocast("cpu", enabled=False):
        blocks = plan_blocks(q.size(1), q.size(0), q.size(2), k.size(2), lengths)
        if len(blocks) == 1 and not (p or torch.is_grad_enabled() or blocks[0].length):
            # for one short text, calls take longer than products
            weights = block_weights(q, k, bias, mask, scale, blocks[0]).to(v.dtype)
            return matmul(weights, blocks[0].cut(v).transpose(2, 3)).transpose(0, 1)
        return BlockedAttention.apply(q, k, v, bias, mask, scale, p, blocks)


LONG = 2048  # longest sequence whose bias is held as a whole in evaluation
LOGITS = 2**24  # logits computed at a time by `attention_by_queries`: 64 MiB of float32


def attention_by_queries(
    q: Tensor, k: Tensor, v: Tensor, bias: Callable[[int, int], Tensor] | None, real: Tensor | None, scale: float
) -> Tensor:
    """softmax(q . k * scale + bias) v on a CPU, a block of queries at a time, without gradients and dropout: neither
    logits nor bias of all pairs are ever there.

    q, k [B, H, L, D], v [B, H, L, E], bias: queries first .. last-1 -> [H, last - first, L], or None; real [B, 1, 1, L]
    or None -> [B, H, L, E].
    """
    batch, heads, length, _ = q.shape
    step = max(1, LOGITS // (batch * heads * length))
    out = q.new_empty(batch, length, heads, v.size(-1)).transpose(1, 2)
    with torch.autocast("cpu", enabled=False):
        for first in range(0, length, step):
            last = min(first + step, length)
            logits = ((q[:, :, first:last] * scale) @ k.transpose(2, 3)).float()
            if bias is not None:
                logits += bias(first, last)
            if real is not None:
                logits.masked_fill_(~real, torch.finfo(logits.dtype).min)  # finite: all keys may be padding
            out[:, :, first:last] = torch.softmax(logits, -1).to(v.dtype) @ v
    return out


ROWS = 1024  # masked tokens whose logits are computed at a time


class LMLoss(torch.autograd.Function):
    """Sum over rows of logsumexp(x W^T + b) - (x W^T + b)[target], ROWS rows at a time.

    The forward pass computes the gradients while it has the logits; the backward pass only scales them, in place,
    because new memory of W's size costs as much time as a product with it. So there can be one backward pass only.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        with_gradient: bool,
    ) -> Tensor:
        w = weight.to(dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        dx, dweight, dbias = torch.empty_like(x), None, torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(x), ROWS):
            rows = slice(start, start + ROWS)
            part, target = padded(x[rows].to(dtype)), targets[rows, None]
            if part.dtype == bias.dtype == torch.float32:
                logits = multiply(part, w, bias)
            else:  # the bias is not rounded
                logits = multiply(part, w).float().add_(bias)
            count = len(target)
            logits -= logits.amax(-1, keepdim=True)
            target_logits = logits[:count].gather(1, target)
            exps = logits.exp_()
            total = exps.sum(-1, keepdim=True)
            loss += (total[:count].log() - target_logits).sum()
            if with_gradient:
                dlogits = exps.div_(total)
                dlogits[:count].scatter_add_(1, target, -torch.ones_like(target_logits))
                dlogits[count:].zero_()
                dbias += dlogits.sum(0)
                dlogits = dlogits.to(dtype)
                dx[rows] = multiply(dlogits, w.t())[:count].to(x.dtype)
                part_of_dweight = product_over_rows(dlogits, part)
                dweight = part_of_dweight if dweight is None else dweight.float().add_(part_of_dweight)
        if with_gradient:
            ctx.gradients = dx, torch.zeros_like(weight) if dweight is None else dweight, dbias
            ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the masked-LM loss supports one backward pass only")
        gradients, ctx.gradients = ctx.gradients, None
        return *(g.to(dtype).mul_(grad) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times the transpose of b [m, k], plus bias [m]."""
    return product(a, b, bias) if on_onednn(a, b) else F.linear(a, b, bias)


def bf16_speed() -> float:
    """How many times as fast as in float32 this machine's CPU multiplies in bfloat16: about 2 by AMD's AVX-512 BF16,
    more by AMX, 0.5 by Intel's AVX-512 BF16, and far less where it is emulated. Takes a hundredth of a second, or,
    emulated, a few tenths."""
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(4):
        for dtype in seconds:
            x = torch.ones(512, 512, dtype=dtype)
            start = time.perf_counter()
            multiply(x, x)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def loss_of_rows(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """The loss of `lm_loss` for a few rows, plainly."""
    logits = F.linear(x, weight).float() + bias.float()
    return F.cross_entropy(logits, targets, reduction="sum")


def lm_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias).float(), targets, reduction="sum")` without holding all logits
    at once.

    x [n, C], weight [V, C], bias [V], targets [n].
    """
    device = autocast_device(x.device.type)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        if dtype == torch.float16:  # fp16 gradients must be scaled before they are rounded, so not in `forward`
            x, weight = x.to(dtype), weight.to(dtype)
            starts = range(0, max(1, len(x)), ROWS)
            chunks = [(x[i : i + ROWS], weight, bias, targets[i : i + ROWS]) for i in starts]
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return sum(checkpoint(loss_of_rows, *chunk, **options) for chunk in chunks)
        return LMLoss.apply(x, weight, bias, targets, dtype, torch.is_grad_enabled())
