"""Softmax attention with a bias that all sequences share, as Triton kernels for NVIDIA cards.

PyTorch's kernels that take a bias write its gradient for every sequence, [B, H, L, L]. Here a kernel of its own sums
it over the batch in registers and writes [H, L, L] once, without atomic additions. With `atomic`, the kernel of keys
and values adds it up instead: two of eleven products less, in an order that differs from run to run.

The kernels are operators, so that a compiled or exported model holds one node of each, whose inside nobody traces.

B batch, L sequence length, H heads, D width of a head, E width of a value head; M queries and N keys of a tile.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel is called then
    triton = tl = None

WIDEST = 128  # of a head
jit: Any = getattr(triton, "jit", lambda function: function)
if TYPE_CHECKING:
    from typing import Any as constexpr
else:
    constexpr = getattr(tl, "constexpr", None)


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int  # loads that are under way at a time


TILES = {  # of a kernel: the fastest of 7 or 8 on an H200, together at L = 512 and 128, bf16, heads 64 wide
    "forward": Tile(64, 64, 4, 2),
    "backward_q": Tile(64, 32, 4, 3),
    "backward_kv": Tile(64, 64, 4, 3),
    "backward_bias": Tile(64, 64, 4, 3),
}
SMALL = Tile(64, 64, 4, 1)  # of heads whose rows are wider than 128 bytes
WIDEST_TILE = max(tile.keys for tile in TILES.values())  # to a multiple of whose keys rows of a bias are laid out
PROGRAMS = 768  # that fill a card: of `backward_bias`, which shares a short sequence's few tiles over the batch


@jit
def _load_rows(X, base, rows, stride, L, width: constexpr, columns: constexpr, EVEN: constexpr):
    """[M, columns] of X at base: rows below L, 0 from `width` columns on."""
    column = tl.arange(0, columns)
    at = X + base + rows[:, None] * stride + column[None]
    if EVEN and width == columns:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(rows[:, None] < L) & (column[None] < width), other=0.0)
    return x


@jit
def _store_rows(X, base, rows, stride, values, L, width: constexpr, columns: constexpr):
    column = tl.arange(0, columns)
    inside = (rows[:, None] < L) & (column[None] < width)
    tl.store(X + base + rows[:, None] * stride + column[None], values.to(X.dtype.element_ty), mask=inside)


@jit
def _logits(
    q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
):  # fmt: skip
    """[M, N] float32; -inf at keys that are padding, or beyond the sequence."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_BIAS:
        at = BIAS + h * bias_h + i[:, None] * bias_i + j[None] * bias_j
        if EVEN:
            bias = tl.load(at)
        elif WHOLE_ROWS:  # of a mask by rows alone, neighbours are loaded together
            bias = tl.load(at, mask=i[:, None] < L, other=0.0)
        else:
            bias = tl.load(at, mask=(i[:, None] < L) & (j[None] < L), other=0.0)
        x += bias.to(tl.float32)
    if HAS_MASK:
        x = tl.where(tl.load(MASK + b * L + j, mask=j < L, other=0)[None] != 0, x, float("-inf"))
    elif not EVEN:
        x = tl.where(j[None] < L, x, float("-inf"))
    return x


@jit
def _exp(x, shift):
    """e^x 2^-shift, [M, N] of x [M, N] and shift [M]."""
    return tl.exp2(x * 1.4426950408889634 - shift[:, None])


@jit
def _hash(x):
    """32 bits that look random, of 32 bits."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@jit
def _kept(SEED, b, h, H, i, j, limit):
    """[M, N], whether a weight stays. Not `tl.rand`, which takes ten times as many instructions: more than all else in
    a kernel. Two neighbours share a hash, of which each takes 16 bits; the compiler computes it once."""
    head = _hash(tl.load(SEED).to(tl.uint32) + (b * H + h).to(tl.uint32))
    row, column = _hash(head ^ i.to(tl.uint32)), _hash(head + 0x1E3779B9 + (j >> 1).to(tl.uint32))
    bits = _hash(row[:, None] + column[None]) >> (16 * (j & 1)[None]).to(tl.uint32)
    return (bits & 0xFFFF).to(tl.int32) >= limit


@jit
def _store_kept(KEPT, kept, row, i, n, L, N: constexpr):
    """Decisions [M, N] from key n on, as bits: 32 keys to a word. A thread has every fourth pair of columns, so that
    the compiler knows the first shift, and the second is the same for all of its decisions."""
    column, words = tl.arange(0, N), tl.cdiv(L, 64) * 2  # of a row
    for word in tl.static_range(N // 32):
        bits = tl.where(kept & (column // 32 == word)[None], (1 << (column & 25))[None], 0) << (column & 6)[None]
        tl.store(KEPT + row * words + n // 32 + word, tl.sum(bits, 1), mask=i < L)


@jit
def _load_kept(KEPT, row, i, n, L, N: constexpr):
    """What `_store_kept` stored."""
    column, words = tl.arange(0, N), tl.cdiv(L, 64) * 2
    at = KEPT + row * words + n // 32
    bits = (tl.load(at, mask=i < L, other=0)[:, None] >> (column & 6)[None]).to(tl.int32)
    if N == 64:
        more = tl.load(at + 1, mask=i < L, other=0)[:, None] >> (column & 6)[None]
        bits = tl.where((column < 32)[None], bits, more)
    return (bits & (1 << (column & 25))[None]) != 0


@jit
def _forward(
    Q, K, V, BIAS, MASK, SEED, KEPT, OUT, LSE, scale, limit, gain, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, out_b, out_h, out_i, bias_h, bias_i, bias_j,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)  # 64 bits: a head may begin beyond 2^31
    i = tl.program_id(1) * M + tl.arange(0, M)  # sequences come first: they share a tile of the bias in the cache
    row = (b * H + h) * L + i
    q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD, EVEN)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, EE], tl.float32)
    for n in range(0, L, N):
        j = n + tl.arange(0, N)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD, EVEN)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE, EVEN)
        x = _logits(
            q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j, HAS_BIAS, HAS_MASK, EVEN, WHOLE_ROWS
        )  # fmt: skip
        new = tl.maximum(top, tl.max(x, 1) * 1.4426950408889634)
        shift = tl.where(new == float("-inf"), 0.0, new)  # no key so far
        weights, fade = _exp(x, shift), tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        if DROPS:
            kept = _kept(SEED, b, h, H, i, j, limit) & (weights >= 0.0)  # always: it gives a thread the places it has
            _store_kept(KEPT, kept, row, i, n, L, N)
            weights = tl.where(kept, weights, 0.0)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if DROPS:
        out = out * gain
    _store_rows(OUT, b * out_b + h * out_h, i, out_i, out / total[:, None], L, E, EE)
    lse = tl.where(empty, 0.0, top + tl.log2(total))
    tl.store(LSE + row, lse, mask=i < L)


@jit
def _gradient_of_logits(
    q, k, v, grad, lse, delta, BIAS, MASK, KEPT, b, h, row, i, n, j, scale, gain, L, bias_h, bias_i, bias_j,
    N: constexpr, HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
):  # fmt: skip
    """(gradient of the logits, weights that stay, without their factor), [M, N] each."""
    x = _logits(q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j, HAS_BIAS, HAS_MASK, EVEN, WHOLE_ROWS)
    weights = _exp(x, lse)
    dropped, of_weights = weights, tl.dot(grad, tl.trans(v), input_precision="ieee")
    if DROPS:
        kept = _load_kept(KEPT, row, i, n, L, N)
        dropped = tl.where(kept, weights, 0.0)
        of_weights = tl.where(kept, of_weights * gain, 0.0)
    return weights * (of_weights - delta[:, None]), dropped


@jit
def _backward_q(
    Q, K, V, OUT, GRAD, BIAS, MASK, KEPT, LSE, DELTA, DQ, scale, gain, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, out_b, out_h, out_i, grad_b, grad_h, grad_i, dq_b, dq_h, dq_i,
    bias_h, bias_i, bias_j,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
):  # fmt: skip
    """And DELTA, out . grad, which the other kernels read."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(1) * M + tl.arange(0, M)
    q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD, EVEN)
    grad = _load_rows(GRAD, b * grad_b + h * grad_h, i, grad_i, L, E, EE, EVEN)
    out = _load_rows(OUT, b * out_b + h * out_h, i, out_i, L, E, EE, EVEN)
    row = (b * H + h) * L + i
    lse, delta = tl.load(LSE + row, mask=i < L, other=0.0), tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + row, delta, mask=i < L)
    dq = tl.zeros([M, DD], tl.float32)
    for n in range(0, L, N):
        j = n + tl.arange(0, N)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD, EVEN)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE, EVEN)
        dx, _ = _gradient_of_logits(
            q, k, v, grad, lse, delta, BIAS, MASK, KEPT, b, h, row, i, n, j, scale, gain, L,
            bias_h, bias_i, bias_j, N, HAS_BIAS, HAS_MASK, DROPS, EVEN, WHOLE_ROWS,
        )  # fmt: skip
        dq += tl.dot(dx.to(k.dtype), k, input_precision="ieee")
    _store_rows(DQ, b * dq_b + h * dq_h, i, dq_i, dq * scale, L, D, DD)


@jit
def _backward_kv(
    Q, K, V, GRAD, BIAS, MASK, KEPT, LSE, DELTA, DK, DV, DBIAS, scale, gain, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, grad_b, grad_h, grad_i, dk_b, dk_h, dk_i, dv_b, dv_h, dv_i,
    bias_h, bias_i, bias_j,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
    ATOMIC: constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * N
    j = n + tl.arange(0, N)
    k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD, EVEN)
    v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE, EVEN)
    dk, dv = tl.zeros([N, DD], tl.float32), tl.zeros([N, EE], tl.float32)
    for m in range(0, L, M):
        i = m + tl.arange(0, M)
        q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD, EVEN)
        grad = _load_rows(GRAD, b * grad_b + h * grad_h, i, grad_i, L, E, EE, EVEN)
        row = (b * H + h) * L + i
        lse, delta = tl.load(LSE + row, mask=i < L, other=0.0), tl.load(DELTA + row, mask=i < L, other=0.0)
        dx, dropped = _gradient_of_logits(
            q, k, v, grad, lse, delta, BIAS, MASK, KEPT, b, h, row, i, n, j, scale, gain, L,
            bias_h, bias_i, bias_j, N, HAS_BIAS, HAS_MASK, DROPS, EVEN, WHOLE_ROWS,
        )  # fmt: skip
        dk += tl.dot(tl.trans(dx.to(q.dtype)), q, input_precision="ieee")
        dv += tl.dot(tl.trans(dropped.to(grad.dtype)), grad, input_precision="ieee")
        if ATOMIC:
            inside = (i[:, None] < L) & (j[None] < L)
            tl.atomic_add(DBIAS + h * L * L + i[:, None] * L + j[None], dx, mask=inside, sem="relaxed")
    if DROPS:
        dv = dv * gain
    _store_rows(DK, b * dk_b + h * dk_h, j, dk_i, dk * scale, L, D, DD)
    _store_rows(DV, b * dv_b + h * dv_h, j, dv_i, dv, L, E, EE)


@jit
def _backward_bias(
    Q, K, V, GRAD, BIAS, MASK, KEPT, LSE, DELTA, DBIAS, scale, gain, B, sequences, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, grad_b, grad_h, grad_i, bias_h, bias_i, bias_j,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr, EVEN: constexpr, WHOLE_ROWS: constexpr,
):  # fmt: skip
    """The gradient of the bias, summed over one part of the batch."""
    part, h = tl.program_id(2).to(tl.int64) // H, tl.program_id(2).to(tl.int64) % H
    i, n = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N
    j = n + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for number in range(0, sequences):
        b = tl.minimum(part * sequences + number, B - 1)
        q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD, EVEN)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD, EVEN)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE, EVEN)
        grad = _load_rows(GRAD, b * grad_b + h * grad_h, i, grad_i, L, E, EE, EVEN)
        row = (b * H + h) * L + i
        lse, delta = tl.load(LSE + row, mask=i < L, other=0.0), tl.load(DELTA + row, mask=i < L, other=0.0)
        dx, _ = _gradient_of_logits(
            q, k, v, grad, lse, delta, BIAS, MASK, KEPT, b, h, row, i, n, j, scale, gain, L,
            bias_h, bias_i, bias_j, N, HAS_BIAS, HAS_MASK, DROPS, EVEN, WHOLE_ROWS,
        )  # fmt: skip
        total += tl.where(part * sequences + number < B, dx, 0.0)
    inside = (i[:, None] < L) & (j[None] < L)
    tl.store(DBIAS + (part * H + h) * L * L + i[:, None] * L + j[None], total, mask=inside)


OPERATORS = re.sub(r"\W", "_", __name__)  # where they are: a Hugging Face folder's copy of this file has its own


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, dropout: float,
    read: Tensor | None = None, atomic: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q . k * scale + bias) v, [B, H, L, E] of q, k [B, H, L, D] and v [B, H, L, E].

    bias: [H, L, L] or None. mask: [B, L] bool, False at padded keys, or None; a sequence of only padding gives 0.
    dropout: its probability, for the weights, drawn with the device's generator.
    read: the bias as the kernels read it, say rounded, without a gradient (default: the bias). The bias' own gradient
    has its own precision, in which autograd adds up those of all layers, in place. atomic: how it is summed over the
    batch, see above.
    """
    read = bias.detach() if bias is not None and read is None else read
    seed = torch.randint(2**30, (1,), device=q.device) if dropout else None
    return _attention(q, k, v, bias, read, mask, seed, scale, dropout, atomic)[0]


@torch.library.custom_op(f"{OPERATORS}::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, read: Tensor | None, mask: Tensor | None,
    seed: Tensor | None, scale: float, dropout: float, atomic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, log2 of each row's sum, the weights that stay as bits)"""
    B, H, L, _ = q.shape
    q, k, v = (in_rows(x) for x in (q, k, v))
    out, lse, kept = new_outputs(q, v, dropout)
    grid, options = launch("forward", q, v, read, mask, seed)
    with torch.cuda.device_of(q):  # Triton launches on the current card; autograd makes the gradient's card current
        _forward[B, grid[0], H](q, k, v, read, bytes_of(mask), seed, kept, out, lse, scale, *dropping(dropout), H, L,
                                *strides(q, k, v, out), *bias_strides(read), **options)  # fmt: skip
    return out, lse, kept


@_attention.register_fake
def _(q, k, v, bias, read, mask, seed, scale, dropout, atomic):
    return new_outputs(q, v, dropout)


@torch.library.custom_op(f"{OPERATORS}::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, read: Tensor | None, mask: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor,
    grad: Tensor, scale: float, dropout: float, atomic: bool, of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of the bias, [H, L, L] float32; of_bias: whether anybody wants it, else it is empty."""
    B, H, L, _ = q.shape
    q, k, v, grad = (in_rows(x) for x in (q, k, v, grad))
    dq, dk, dv, delta = empty_like(q), empty_like(k), empty_like(v), torch.empty_like(lse)
    (_, gain), drops = dropping(dropout), kept if dropout else None
    shared, of_read = (grad, read, bytes_of(mask), kept, lse, delta), bias_strides(read)
    with torch.cuda.device_of(q):
        grid, options = launch("backward_q", q, v, read, mask, drops)
        _backward_q[B, grid[0], H](q, k, v, out, *shared, dq, scale, gain, H, L,
                                   *strides(q, k, v, out, grad, dq), *of_read, **options)  # fmt: skip
        grid, options = launch("backward_kv", q, v, read, mask, drops)
        atomic = atomic and of_bias
        dbias = q.new_zeros((H, L, L) if atomic else 0, dtype=torch.float32)
        _backward_kv[B, grid[1], H](q, k, v, *shared, dk, dv, dbias, scale, gain, H, L,
                                    *strides(q, k, v, grad, dk, dv), *of_read, ATOMIC=atomic, **options)  # fmt: skip
        if atomic or not of_bias:
            return dq, dk, dv, dbias
        grid, options = launch("backward_bias", q, v, read, mask, drops)
        sequences = triton.cdiv(B, triton.cdiv(PROGRAMS, grid[0] * grid[1] * H))
        parts = triton.cdiv(B, sequences)
        dbias, programs = q.new_empty(parts, H, L, L, dtype=torch.float32), (*grid, parts * H)
        _backward_bias[programs](q, k, v, *shared, dbias, scale, gain, B, sequences, H, L,
                                 *strides(q, k, v, grad), *of_read, **options)  # fmt: skip
        return dq, dk, dv, dbias.sum(0) if parts > 1 else dbias[0]


@_attention_backward.register_fake
def _(q, k, v, read, mask, out, lse, kept, grad, scale, dropout, atomic, of_bias):
    _, H, L, _ = q.shape
    return empty_like(q), empty_like(k), empty_like(v), q.new_empty((H, L, L) if of_bias else 0, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, read, mask, _, *ctx.numbers = inputs
    ctx.dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(q, k, v, read, mask, *output)
    ctx.set_materialize_grads(False)  # nobody reads the other outputs


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    of_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = _attention_backward(*ctx.saved_tensors, grad, *ctx.numbers, of_bias)
    return dq, dk, dv, dbias.to(ctx.dtype) if of_bias else None, *(None,) * 6


_attention.register_autograd(_backward, setup_context=_setup_context)


def new_outputs(q: Tensor, v: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    B, H, L, _ = q.shape
    kept = q.new_empty((B, H, L, -(-L // 64) * 2) if dropout else 0, dtype=torch.int32)
    return empty_like(v), q.new_empty(B, H, L, dtype=torch.float32), kept


def dropping(dropout: float) -> tuple[int, float]:
    """(limit below which 16 random bits drop a weight, factor of those that stay): the probability is rounded to a
    multiple of 1.5e-5."""
    limit = round(dropout * 2**16)
    return limit, 1 / (1 - limit / 2**16) if limit < 2**16 else 0.0


def bytes_of(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.int8)


def in_rows(x: Tensor) -> Tensor:
    """x, copied only where the columns of a row are not neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """[B, H, L, D] as what [B, L, H, D] is a view of: that is how the model reads it on."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def strides(*tensors: Tensor) -> list[int]:
    """The strides of sequence, head and row of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def bias_strides(bias: Tensor | None) -> list[int]:
    """The strides of head, query and key."""
    return [0, 0, 0] if bias is None else [*bias.stride()]


def launch(
    kernel: str, q: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, drops: Tensor | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """(tiles of queries and of keys, what the kernel is compiled for)."""
    (L, D), E = q.shape[2:], v.size(-1)
    tile = TILES[kernel] if max(D, E) * q.element_size() <= 128 else SMALL
    options = {"D": D, "E": E, "DD": max(16, triton.next_power_of_2(D)), "EE": max(16, triton.next_power_of_2(E))}
    options |= {"HAS_BIAS": bias is not None, "HAS_MASK": mask is not None, "DROPS": drops is not None}
    options |= {"M": tile.queries, "N": tile.keys, "EVEN": L % tile.queries == L % tile.keys == 0}
    options["WHOLE_ROWS"] = bias is not None and has_whole_rows(bias, tile.keys)
    grid = triton.cdiv(L, tile.queries), triton.cdiv(L, tile.keys)
    return grid, options | {"num_warps": tile.warps, "num_stages": tile.stages}


def has_whole_rows(bias: Tensor, keys: int) -> bool:
    """Whether rows of bias [H, L, L] go on, with any numbers, to a multiple of `keys`. Then 16 bytes are loaded at a
    time whatever L is, and 85 % of batches have an L that is no multiple of 8."""
    return bias.stride(2) == 1 and bias.stride(1) >= triton.cdiv(bias.size(2), keys) * keys


def interpreted() -> bool:
    """Whether kernels run on a CPU, in Triton's interpreter (TRITON_INTERPRET=1 before they are imported)."""
    return type(_forward).__name__ == "InterpretedFunction"
