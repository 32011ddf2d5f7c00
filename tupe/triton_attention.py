"""Softmax attention with a bias that all sequences share, as Triton kernels for NVIDIA cards.

PyTorch's kernels that take a bias write its gradient for every sequence, [B, H, L, L]. Here a kernel of its own sums
it over the batch in registers and writes [H, L, L] once, without atomic additions.

B batch, L sequence length, H heads, D width of a head, E width of a value head; M queries and N keys of a tile.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel is called then
    triton = tl = None

WIDEST = 128  # of a head
TILE = 64  # queries, or keys
jit, constexpr = getattr(triton, "jit", lambda function: function), getattr(tl, "constexpr", None)


@jit
def _sequence_and_head():
    """In 64 bits: a head's bias, or a sequence's queries, may begin beyond 2^31."""
    return tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)


@jit
def _load_rows(X, base, rows, stride, L, width: constexpr, columns: constexpr):
    """[M, columns] of X at base: rows below L, 0 from `width` columns on."""
    column = tl.arange(0, columns)
    inside = (rows[:, None] < L) & (column[None] < width)
    return tl.load(X + base + rows[:, None] * stride + column[None], mask=inside, other=0.0)


@jit
def _store_rows(X, base, rows, values, L, width: constexpr, columns: constexpr):
    column = tl.arange(0, columns)
    inside = (rows[:, None] < L) & (column[None] < width)
    tl.store(X + base + rows[:, None] * width + column[None], values.to(X.dtype.element_ty), mask=inside)


@jit
def _logits(
    q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j, bias_0,
    HAS_BIAS: constexpr, HAS_MASK: constexpr,
):  # fmt: skip
    """[M, N] float32; -inf at keys that are padding, or beyond the sequence."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (i[:, None] < L) & (j[None] < L)
    if HAS_BIAS:
        bias = tl.load(BIAS + bias_0 + h * bias_h + i[:, None] * bias_i + j[None] * bias_j, mask=seen, other=0.0)
        x += bias.to(tl.float32)
    if HAS_MASK:
        seen = seen & (tl.load(MASK + b * L + j, mask=j < L, other=0)[None] != 0)
    return tl.where(seen, x, float("-inf"))


@jit
def _kept(SEED, b, h, H, i, j, L, dropout):
    """[M, N], whether a weight stays: the same in every kernel, because it depends on its place only."""
    return tl.rand(tl.load(SEED) + (b * H + h).to(tl.int32), i[:, None] * L + j[None]) >= dropout


@jit
def _forward(
    Q, K, V, BIAS, MASK, SEED, OUT, LSE, scale, dropout, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, bias_h, bias_i, bias_j, bias_0,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr,
):  # fmt: skip
    b, h = _sequence_and_head()  # sequences first: they share a tile of the bias in the cache
    i = tl.program_id(1) * M + tl.arange(0, M)
    q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, EE], tl.float32)
    for n in range(0, L, N):
        j = n + tl.arange(0, N)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE)
        x = _logits(
            q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j, bias_0, HAS_BIAS, HAS_MASK
        )  # fmt: skip
        new = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # no key so far
        weights, fade = tl.exp(x - shift[:, None]), tl.exp(top - shift)
        total = total * fade + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(_kept(SEED, b, h, H, i, j, L, dropout), weights / (1 - dropout), 0.0)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    _store_rows(OUT, (b * H + h) * L * E, i, out / total[:, None], L, E, EE)
    lse = tl.where(empty, 0.0, top + tl.log(total))
    tl.store(LSE + (b * H + h) * L + i, lse, mask=i < L)


@jit
def _gradient_of_logits(
    q, k, v, grad, BIAS, MASK, SEED, LSE, DELTA, b, h, H, i, j, scale, dropout, L, bias_h, bias_i, bias_j, bias_0,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr,
):  # fmt: skip
    """(gradient of the logits, weights after dropout), [M, N] each."""
    x = _logits(q, k, BIAS, MASK, b, h, i, j, scale, L, bias_h, bias_i, bias_j, bias_0, HAS_BIAS, HAS_MASK)
    row = (b * H + h) * L + i
    lse, delta = tl.load(LSE + row, mask=i < L, other=0.0), tl.load(DELTA + row, mask=i < L, other=0.0)
    weights = tl.exp(x - lse[:, None])
    dropped, of_weights = weights, tl.dot(grad, tl.trans(v), input_precision="ieee")
    if DROPS:
        kept = _kept(SEED, b, h, H, i, j, L, dropout)
        dropped = tl.where(kept, weights / (1 - dropout), 0.0)
        of_weights = tl.where(kept, of_weights / (1 - dropout), 0.0)
    return weights * (of_weights - delta[:, None]), dropped


@jit
def _backward_q(
    Q, K, V, GRAD, BIAS, MASK, SEED, LSE, DELTA, DQ, scale, dropout, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, bias_h, bias_i, bias_j, bias_0,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr,
):  # fmt: skip
    b, h = _sequence_and_head()
    i = tl.program_id(1) * M + tl.arange(0, M)
    q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD)
    grad = _load_rows(GRAD, (b * H + h) * L * E, i, E, L, E, EE)
    dq = tl.zeros([M, DD], tl.float32)
    for n in range(0, L, N):
        j = n + tl.arange(0, N)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE)
        dx, _ = _gradient_of_logits(
            q, k, v, grad, BIAS, MASK, SEED, LSE, DELTA, b, h, H, i, j, scale, dropout, L,
            bias_h, bias_i, bias_j, bias_0, HAS_BIAS, HAS_MASK, DROPS,
        )  # fmt: skip
        dq += tl.dot(dx.to(k.dtype), k, input_precision="ieee")
    _store_rows(DQ, (b * H + h) * L * D, i, dq * scale, L, D, DD)


@jit
def _backward_kv(
    Q, K, V, GRAD, BIAS, MASK, SEED, LSE, DELTA, DK, DV, scale, dropout, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, bias_h, bias_i, bias_j, bias_0,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr,
):  # fmt: skip
    b, h = _sequence_and_head()
    j = tl.program_id(1) * N + tl.arange(0, N)
    k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD)
    v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE)
    dk, dv = tl.zeros([N, DD], tl.float32), tl.zeros([N, EE], tl.float32)
    for m in range(0, L, M):
        i = m + tl.arange(0, M)
        q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD)
        grad = _load_rows(GRAD, (b * H + h) * L * E, i, E, L, E, EE)
        dx, dropped = _gradient_of_logits(
            q, k, v, grad, BIAS, MASK, SEED, LSE, DELTA, b, h, H, i, j, scale, dropout, L,
            bias_h, bias_i, bias_j, bias_0, HAS_BIAS, HAS_MASK, DROPS,
        )  # fmt: skip
        dk += tl.dot(tl.trans(dx.to(q.dtype)), q, input_precision="ieee")
        dv += tl.dot(tl.trans(dropped.to(grad.dtype)), grad, input_precision="ieee")
    _store_rows(DK, (b * H + h) * L * D, j, dk * scale, L, D, DD)
    _store_rows(DV, (b * H + h) * L * E, j, dv, L, E, EE)


@jit
def _backward_bias(
    Q, K, V, GRAD, BIAS, MASK, SEED, LSE, DELTA, DBIAS, scale, dropout, B, H, L,
    q_b, q_h, q_i, k_b, k_h, k_i, v_b, v_h, v_i, bias_h, bias_i, bias_j, bias_0,
    D: constexpr, E: constexpr, DD: constexpr, EE: constexpr, M: constexpr, N: constexpr,
    HAS_BIAS: constexpr, HAS_MASK: constexpr, DROPS: constexpr,
):  # fmt: skip
    _, h = _sequence_and_head()
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for sequence in range(B):
        b = h * 0 + sequence  # 64 bits
        q = _load_rows(Q, b * q_b + h * q_h, i, q_i, L, D, DD)
        k = _load_rows(K, b * k_b + h * k_h, j, k_i, L, D, DD)
        v = _load_rows(V, b * v_b + h * v_h, j, v_i, L, E, EE)
        grad = _load_rows(GRAD, (b * H + h) * L * E, i, E, L, E, EE)
        dx, _ = _gradient_of_logits(
            q, k, v, grad, BIAS, MASK, SEED, LSE, DELTA, b, h, H, i, j, scale, dropout, L,
            bias_h, bias_i, bias_j, bias_0, HAS_BIAS, HAS_MASK, DROPS,
        )  # fmt: skip
        total += dx
    tl.store(DBIAS + h * L * L + i[:, None] * L + j[None], total, mask=(i[:, None] < L) & (j[None] < L))


class SharedBiasAttention(torch.autograd.Function):
    """softmax(q . k * scale + bias) v, [B, H, L, E] of q, k [B, H, L, D] and v [B, H, L, E].

    bias: [H, L, L], or [H, 2L - 1] by the offset of key from query, or None. mask: [B, L] bool, False at padded keys,
    or None; a sequence of only padding gives 0. dropout: of the weights, drawn with the device's generator.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        (B, H, L, D), E = q.shape, v.size(-1)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        mask = None if mask is None else mask.to(torch.int8).contiguous()
        seed = torch.randint(2**30, (1,), device=q.device) if dropout else None
        out, lse = q.new_empty(B, H, L, E), q.new_empty(B, H, L, dtype=torch.float32)
        ctx.scale, ctx.dropout = scale, dropout
        grid = B, triton.cdiv(L, TILE), H
        _forward[grid](q, k, v, bias, mask, seed, out, lse, scale, dropout, H, L, *strides(q, k, v, bias, L),
                       **sizes(D, E, bias, mask, dropout))  # fmt: skip
        ctx.save_for_backward(q, k, v, bias, mask, seed, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, seed, out, lse = ctx.saved_tensors
        (B, H, L, D), E = q.shape, v.size(-1)
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        shared = q, k, v, grad, bias, mask, seed, lse, delta
        rest, options = strides(q, k, v, bias, L), sizes(D, E, bias, mask, ctx.dropout)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        tiles = triton.cdiv(L, TILE)
        _backward_q[B, tiles, H](*shared, dq, ctx.scale, ctx.dropout, H, L, *rest, **options)
        _backward_kv[B, tiles, H](*shared, dk, dv, ctx.scale, ctx.dropout, H, L, *rest, **options)
        dbias = None
        if bias is not None and ctx.needs_input_grad[3]:
            dbias = q.new_empty(H, L, L, dtype=torch.float32)
            _backward_bias[tiles, tiles, H](*shared, dbias, ctx.scale, ctx.dropout, B, H, L, *rest, **options)
            dbias = (by_offset(dbias) if bias.dim() == 2 else dbias).to(bias.dtype)
        return dq, dk, dv, dbias, None, None, None


def strides(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, length: int) -> list[int]:
    """Of q, k and v those of sequence, head and row; of the bias those of head, query and key, and where it begins."""
    of_bias = [0, 0, 0, 0]
    if bias is not None and bias.dim() == 3:
        of_bias = [*bias.stride(), 0]
    elif bias is not None:  # the entry of offset j - i is number L - 1 + j - i
        head, step = bias.stride()
        of_bias = [head, -step, step, (length - 1) * step]
    return [stride for x in (q, k, v) for stride in x.stride()[:3]] + of_bias


def sizes(D: int, E: int, bias: Tensor | None, mask: Tensor | None, dropout: float) -> dict:
    """What kernels are compiled for."""
    padded = {"DD": max(16, triton.next_power_of_2(D)), "EE": max(16, triton.next_power_of_2(E))}
    flags = {"HAS_BIAS": bias is not None, "HAS_MASK": mask is not None, "DROPS": dropout > 0}
    return {"D": D, "E": E, **padded, "M": TILE, "N": TILE, **flags}


def by_offset(x: Tensor) -> Tensor:
    """[H, L, L] -> [H, 2L - 1], the sum of the entries with the same offset of key from query."""
    length = x.size(-1)
    index = torch.arange(length, device=x.device)
    index = (index - index[:, None] + length - 1).flatten()
    return x.new_zeros(len(x), 2 * length - 1).index_add_(1, index, x.flatten(1))


attention = SharedBiasAttention.apply


def interpreted() -> bool:
    """Whether kernels run on a CPU, in Triton's interpreter (TRITON_INTERPRET=1 before they are imported)."""
    return type(_forward).__name__ == "InterpretedFunction"
