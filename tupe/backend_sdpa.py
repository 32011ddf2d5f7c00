"""PyTorch's fused kernels for GPUs.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

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


class Spans(NamedTuple):
    """Padding, or a window, for flash attention, which takes no mask, but sequences of any lengths in a row: the tokens
    of a sequence are one, and the padding behind them is another. So nothing is moved, and shapes do not change."""

    bounds: Tensor | None  # [2 B + 1] int32, where they begin in the flattened batch, and the end; None: no padding
    reach: int | None  # how far tokens see
    batch: Batch

    @classmethod
    def of(cls, batch: Batch, reach: int | None) -> "Spans":
        mask = batch.packing.mask
        if mask is None:
            return cls(None, reach, batch)
        begins = torch.arange(len(mask), device=mask.device) * mask.size(1)
        bounds = torch.stack([begins, begins + mask.sum(1)], dim=1).flatten()
        return cls(F.pad(bounds, (0, 1), value=mask.numel()).int(), reach, batch)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel of flash attention."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes_spans(batch: Batch, reach: int | None) -> bool:
    """Whether flash attention computes a batch without a bias, which needs a mask otherwise. It does not know [CLS],
    which sees beyond a window, nor positions that are not consecutive."""
    positions, packing = batch.token_positions, batch.packing
    if is_traced() or not has_flash(positions.device, batch.dtype):
        return False
    if packing.mask is not None and not packing.on_the_right:
        return False
    if reach is None:  # without padding, PyTorch's function calls flash attention itself
        return packing.mask is not None
    return not batch.untie_cls and positions.drawn is None


def flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, reach: int | None, scale: float, dropout: float
) -> Tensor:
    """Attention within each of the spans of q, k and v [T, H, D]: [T, H, D]. PyTorch's `varlen_attn` is this operator
    without dropout."""
    sizes = bounds, bounds, longest, longest
    options = {"scale": scale, "window_size_left": reach, "window_size_right": reach}
    return torch.ops.aten._flash_attention_forward(q, k, v, *sizes, dropout, False, False, **options)[0]


class Sdpa(Windowed):
    """The kernels read the bias in the queries' precision, in rows whose strides are multiples of 8: it is rounded and
    laid out once per forward pass, or every layer would keep a copy."""

    name = "sdpa"

    def prepare(self, bias: Any, gate: Tensor | None, reach: int | None, batch: Batch) -> Any:
        if bias is None and takes_spans(batch, reach):
            return Spans.of(batch, reach)
        return super().prepare(bias, gate, reach, batch)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Any, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(prepared, Spans):
            return super().mix(q, k, v, content, prepared, scale, dropout)
        bounds, reach, batch = prepared
        width = max(q.size(-1), v.size(-1))
        width += -width % 8  # of all three, a multiple of 8
        if width > 256:  # or flash attention refuses
            return self.mix_whole(q, k, v, content, self.prepare_whole(None, None, reach, batch), scale, dropout)
        sequences, _, length, own = v.shape
        if bounds is None:
            bounds = torch.arange(sequences + 1, dtype=torch.int32, device=v.device) * length
        if not q.size(-1) == v.size(-1) == width:  # padding by nothing would copy
            q, k, v = (F.pad(x, (0, width - x.size(-1))) for x in (q, k, v))
        # [B, H, L, width] -> [B L, H, width], in the batch's precision: autocast does not know the operator
        q, k, v = (x.to(batch.dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = flash(q, k, v, bounds, length, reach, scale, dropout)
        return out.unflatten(0, (sequences, length))[..., :own].transpose(1, 2), None

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
