"""Functions that are faster on a CPU than PyTorch's own: a float32 product, dropout, and the split into heads.

B batch, L sequence length, T rows of token-wise work, H heads, D width of a head, C model width. Tests compare each
function with its plain counterpart, and docs/dev/kernels.md has the measurement that justifies it.
"""

import functools
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .tracing import is_traced


def is_amd() -> bool:
    """Whether this machine's processor is one of AMD's."""
    cpu = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpu.read_text() if cpu.exists() else platform.processor())


# In float32 on a CPU, PyTorch multiplies with MKL, which uses only half the width of an AMD processor's vector units.
# oneDNN uses all of it; it is part of PyTorch too, which calls it for bfloat16 only. On Intel's, MKL is the faster one.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ONEDNN = HAS_ONEDNN and is_amd()


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times the transpose of b [m, k], plus bias [m]: [n, m], all float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(dense(a), dense(b), bias, "none", [], "")


def dense(x: Tensor) -> Tensor:
    """A copy of the matrix if there are gaps between its rows or columns: there oneDNN is a thousand times slower."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def on_onednn(*tensors: Tensor) -> bool:
    """Whether `product` can multiply these tensors: it takes neither empty ones nor subclasses."""
    if not ONEDNN:
        return False
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter):
            return False
        if t.device.type != "cpu" or t.dtype != torch.float32 or not t.numel():
            return False
    return True


@functools.lru_cache(4096)
def rounded_up(rows: int) -> int:
    """A number of rows, raised by at most a sixteenth, so that only 17 numbers remain between one power of 2 and the
    next.

    oneDNN caches a kernel for every shape, and these fragment the memory: since every batch has another number of
    tokens, and of masked ones, a process would grow by gigabytes.
    """
    step = max(1, 2 ** (rows.bit_length() - 5))
    return rows + -rows % step


def padded(x: Tensor) -> Tensor:
    """x [n, k] with rows of zeros appended, up to `rounded_up` rows."""
    rows = x.size(0)  # faster than len
    more = rounded_up(rows) - rows
    return F.pad(x, (0, 0, 0, more)) if more else x


def product_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` of x [n, k], which is `padded` for it: [n, m]."""
    return product(padded(x), weight, bias)[: x.size(0)]


def product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [n, m] times b [n, k]: [m, k], as a weight's gradient is. oneDNN copies the first matrix if it
    is transposed. So the order is the one that copies less, counting the result if it has to be transposed back."""
    if not on_onednn(a, b):
        return a.t() @ b
    (n, m), k = a.shape, b.size(1)
    if m * n <= k * n + m * k:
        return product(a.t(), b.t())
    return product(b.t(), a.t()).t().contiguous()


class OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_of_rows(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated again
            return grad @ weight, grad.t() @ x, grad.sum(0) if needs_bias else None
        padded_grad = padded(grad)
        return (
            product(padded_grad, weight.t())[: len(x)] if needs_x else None,
            product_over_rows(padded_grad, padded(x)) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with oneDNN in float32 on a CPU: x [..., C], weight [K, C], bias [K] -> [..., K]."""
    if is_traced() or not on_onednn(x, weight) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.size(-1))
    y = OneDnnLinear.apply(rows, weight, bias) if torch.is_grad_enabled() else product_of_rows(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.size(0))


class Linear(torch.nn.Linear):
    """`nn.Linear` on the function `linear` above."""

    shrunk: tuple[slice, float] | None = None  # rows whose initial values are smaller by a factor

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
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        dropout_mask = DropoutMask(p)
        ctx.scale = dropout_mask.scale
        kept = dropout_mask.draw(torch.empty(x.shape, dtype=torch.bool))
        ctx.save_for_backward(kept)
        return select(x, kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return grad * kept * ctx.scale, None
        return select(grad, kept).mul_(ctx.scale), None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`F.dropout`, several times as fast on a CPU."""
    if not training or p == 0:
        return x
    if p == 1 or x.device.type != "cpu" or is_traced():
        return F.dropout(x, p)
    return Dropout.apply(x, p)


class SplitHeads(torch.autograd.Function):
    """[B, L, 3 C] -> q, k, v [B, H, L, D]; the backward pass makes one copy where PyTorch makes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        batch, heads, length, width = grads[0].shape
        out = grads[0].new_empty(batch, length, 3, heads, width)
        for i, grad in enumerate(grads):
            out[:, :, i] = grad.transpose(1, 2)
        return out.flatten(2), None


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, L, D] of their joint projection x [B, L, 3 C]."""
    if not torch.is_grad_enabled() or is_traced():
        return x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return SplitHeads.apply(x, heads)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times the transpose of b [m, k], plus bias [m]."""
    return product(a, b, bias) if on_onednn(a, b) else F.linear(a, b, bias)
