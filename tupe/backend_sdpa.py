"""PyTorch's fused kernels for GPUs.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import Batch, Prepared, mask_logits
from .tracing import is_exported, is_traced
from .windows import Windowed

# Flash attention takes no bias, the memory-efficient kernel does, the plain one is for what both refuse. cuDNN's, which
# PyTorch >= 2.11 prefers on H100 and H200, is left out: with a mask its backward pass gives NaN where L % 128 = 64
# (pytorch/pytorch#196678), and it misreads float32 masks under bfloat16 (pytorch/pytorch#191612).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Sdpa(Windowed):
    """The kernels read the bias in the queries' precision, in rows whose strides are multiples of 8: it is rounded and
    laid out once per forward pass, or every layer would keep a copy."""

    name = "sdpa"

    def prepare_whole(self, bias: Tensor | None, gate: Tensor | None, reach: int | None, batch: Batch) -> Prepared:
        seen = batch.seen(reach)
        bias = None if bias is None else aligned(bias.to(batch.dtype))
        if seen is not None:
            bias = mask_logits(bias, aligned(seen), batch.dtype)
        return Prepared(None if bias is None else bias[..., : batch.token_positions.length])

    def prepare_chunks(self, bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Prepared:
        bias = bias.to(dtype)
        if mask is not None:
            bias = mask_logits(bias, mask)  # [B, H n, c, K]
        return Prepared(aligned(bias)[..., : bias.size(-1)])

    def mix_whole(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Prepared, scale: float, dropout: float
    ) -> tuple[Tensor, None]:
        bias = prepared.bias
        if bias is not None and bias.dim() == 3:
            bias = bias[None]  # the kernels accept masks of two or four dimensions
        with nullcontext() if is_exported() else sdpa_kernel(KERNELS):  # other engines have kernels of their own
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale), None


def aligned(x: Tensor, multiple: int = 8) -> Tensor:
    """x [..., L] in contiguous rows of a multiple of 8 numbers: CUDA's fused kernels copy or refuse others. In compiled
    code, which is to serve every L, always more than L. multiple: another one, for kernels that want it."""
    if is_exported():
        return x
    length = x.size(-1)
    if not is_traced() and length % multiple == 0:
        return x.contiguous()
    return F.pad(x, (0, multiple - length % multiple)).contiguous()
