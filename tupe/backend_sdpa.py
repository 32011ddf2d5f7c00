"""PyTorch's fused kernels for GPUs.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import Backend, Batch, Prepared, mask_logits
from .windows import Chunks

# Flash attention takes no bias, the memory-efficient kernel does, the plain one is for what both refuse. cuDNN's, which
# PyTorch >= 2.11 prefers on H100 and H200, is left out: with a mask its backward pass gives NaN where L % 128 = 64
# (pytorch/pytorch#196678), and it misreads float32 masks under bfloat16 (pytorch/pytorch#191612).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Sdpa(Backend):
    """The kernels read the bias in the queries' precision: it is rounded once per forward pass, not in every layer."""

    name = "sdpa"

    def prepare(self, bias: Tensor | None, gate: Tensor | None, reach: int | None, batch: Batch) -> Prepared:
        bias = None if bias is None else bias.to(batch.dtype)
        seen = batch.seen(reach)
        return Prepared(bias if seen is None else mask_logits(bias, seen))

    def prepare_chunks(self, bias: Tensor, mask: Tensor | None, batch: Batch, window: Chunks) -> Prepared:
        """bias [H n or n, c, K], mask [B, n, 1, K] or None of a window's n chunks."""
        bias = bias.to(batch.dtype)
        if len(bias) == window.chunks:
            bias = bias.repeat(batch.heads, 1, 1)
        if mask is not None:
            mask = mask.repeat(1, batch.heads, 1, 1)
            bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)  # [B, H n, c, K]
        return Prepared(bias)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: None, prepared: Prepared, scale: float, dropout: float
    ) -> tuple[Tensor, None]:
        bias = None if prepared.bias is None else prepared.bias.to(q.dtype)  # no copy, but under a mask alone
        if bias is not None and bias.dim() == 3:
            bias = bias[None]  # the kernels accept masks of two or four dimensions
        with sdpa_kernel(KERNELS):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale), None
