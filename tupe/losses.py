"""The masked-LM loss without the logits of all masked tokens at once.

n masked tokens, C model width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .cpu import multiply, padded, product_over_rows
from .positions import autocast_device, precision_of
from .tracing import is_traced

LM_LOSS_ROWS = 1024  # masked tokens whose logits are computed at a time


class LMLoss(torch.autograd.Function):
    """Sum over rows of logsumexp(x W^T + b) - (x W^T + b)[target], LM_LOSS_ROWS rows at a time.

    The forward pass computes the gradients while it has the logits; the backward pass only scales them, in place,
    because new memory of W's size costs as much time as a product with it. So there can be one backward pass only.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
        for start in range(0, len(x), LM_LOSS_ROWS):
            rows = slice(start, start + LM_LOSS_ROWS)
            chunk, target = padded(x[rows].to(dtype)), targets[rows, None]
            if chunk.dtype == bias.dtype == torch.float32:
                logits = multiply(chunk, w, bias)
            else:  # the bias is not rounded
                logits = multiply(chunk, w).float().add_(bias)
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
                dweight_of_chunk = product_over_rows(dlogits, chunk)
                dweight = dweight_of_chunk if dweight is None else dweight.float().add_(dweight_of_chunk)
        if with_gradient:
            ctx.gradients = dx, torch.zeros_like(weight) if dweight is None else dweight, dbias
            ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the masked-LM loss supports one backward pass only")
        gradients, ctx.gradients = ctx.gradients, None
        return *(g.to(dtype).mul_(grad) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def loss_of_rows(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """The loss of `lm_loss` for a few rows, plainly."""
    logits = F.linear(x, weight).float() + bias.float()
    return F.cross_entropy(logits, targets, reduction="sum")


def lm_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias).float(), targets, reduction="sum")` without holding all logits
    at once.

    x [n, C], weight [V, C], bias [V], targets [n]: ids, and -100, which has no loss, in compiled code alone.
    """
    dtype = precision_of(x)
    with torch.autocast(autocast_device(x.device.type), enabled=False):
        if is_traced():  # compiled code fuses what is done to logits; targets of -100 have no loss
            logits = F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
            return F.cross_entropy(logits.float(), targets, reduction="sum")
        if dtype == torch.float16:  # fp16 gradients must be scaled before they are rounded, so not in `forward`
            x, weight = x.to(dtype), weight.to(dtype)
            starts = range(0, max(1, len(x)), LM_LOSS_ROWS)
            chunks = [(x[i : i + LM_LOSS_ROWS], weight, bias, targets[i : i + LM_LOSS_ROWS]) for i in starts]
            losses: list[Tensor] = [
                checkpoint(loss_of_rows, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
            ]
            return sum(losses[1:], losses[0])
        return LMLoss.apply(x, weight, bias, targets, dtype, torch.is_grad_enabled())
