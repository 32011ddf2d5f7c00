"""Attention with every position term. The plain path reads like the formulas, and tests compare every faster path
with it; `choose` picks the path.

B batch, L sequence length, H heads, D width of a head, E width of a value head (D, but for gated attention units).

    weights = normaliser((q . k + content) * scale + bias) * gate            [B, H, L, L]
    out     = weights v + value(weights)                                     [B, H, L, E]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import kernels
from .kernels import attention_by_queries, blocked_attention
from .offsets import Places
from .packing import NO_PADDING, Packing
from .positions import Layer, Positions, overrides
from .windows import Chunks


class Terms(NamedTuple):
    """What attention needs beside q, k and v and what does not depend on them; computed once per forward pass by
    `Encoder.terms`."""

    scale: float
    # [H, L, L], or [B, H, L, L] with the lowest number at padded keys; float32, or q's dtype for sdpa. For long
    # sequences on the blocked path, without gradients, a function: queries first .. last-1 -> [H, last - first, L]
    bias: Tensor | Callable | None = None
    gate: Tensor | None = None  # [H, L, L]
    # [B, 1, 1, L], False at padded keys; if given, the bias ignores padding. Under a window, where not every query sees
    # the same keys, [B or 1, 1, L, L]
    real: Tensor | None = None
    path: str = "plain"  # a name from PATHS
    packing: Packing = NO_PADDING  # what makes [B, L, C] of a layer's tokens
    places: Places | None = None  # where the tokens stand
    # Of layers with a window, on the fast paths: its chunks, for which bias and real are (see `Chunks`), and the terms
    # of the query [CLS], if it sees all.
    window: Chunks | None = None
    of_cls: "Terms | None" = None


# Normalisers: logits [B, H, L, L] and real [B, 1, 1, L] or None -> weights.


def softmax(logits: Tensor, real: Tensor | None) -> Tensor:
    return torch.softmax(logits, dim=-1)


def l2(logits: Tensor, real: Tensor | None) -> Tensor:
    """e^b / sqrt(sum e^2b): the weights of a row have unit Euclidean norm (Su, 2022)."""
    if real is not None:
        logits = logits.masked_fill(~real, torch.finfo(logits.dtype).min / 4)  # finite when doubled
    return torch.exp(logits - torch.logsumexp(2 * logits, dim=-1, keepdim=True) / 2)


def exp(logits: Tensor, real: Tensor | None) -> Tensor:
    """e^b, without a denominator."""
    return mask(torch.exp(logits), real)


def relu2(logits: Tensor, real: Tensor | None) -> Tensor:
    """relu(b)^2 / n with n real keys (GAU: Hua et al., 2022)."""
    n = logits.size(-1) if real is None else real.sum(-1, keepdim=True).clamp(min=1)
    return mask(torch.relu(logits).square() / n, real)


def swish_l2(logits: Tensor, real: Tensor | None) -> Tensor:
    """b sigmoid(b), each row divided by its Euclidean norm."""
    return F.normalize(mask(F.silu(logits), real), dim=-1)


def mask(weights: Tensor, real: Tensor | None) -> Tensor:
    return weights if real is None else weights.masked_fill(~real, 0)  # exactly 0 at padding


NORMALISERS = {"softmax": softmax, "l2": l2, "exp": exp, "relu2": relu2, "swish_l2": swish_l2}


def attention_weights(
    q: Tensor, k: Tensor, terms: Terms, content: Tensor | None = None, normaliser: str = "softmax"
) -> Tensor:
    """Gated weights [B, H, L, L] in q's dtype; q, k: [B, H, L, D], content: [B, H, L, L]. Everything after q . k is
    computed in float32 (or in float64, if the model is)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = ((q * terms.scale) @ k.transpose(2, 3)).to(dtype)
    if content is not None:
        logits = logits + content.to(dtype) * terms.scale
    if terms.bias is not None:
        logits = logits + terms.bias
    weights = NORMALISERS[normaliser](logits, terms.real)
    if terms.gate is not None:
        weights = weights * terms.gate
    return weights.to(q.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    layer: Layer,
    normaliser: str = "softmax",
    dropout: float = 0.0,
) -> Tensor:
    """Mix the values v [B, H, L, E] -> [B, H, L, E] on the path that `terms` names.

    dropout: probability, which the caller sets to 0 outside training.
    """
    return PATHS[terms.path](q, k, v, positions, terms, layer, normaliser, dropout)


def plain(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, layer: Layer, normaliser: str, dropout: float
) -> Tensor:
    """Every scheme, every normaliser, every device."""
    content = positions.content(q, k, layer)
    q, k, v = positions.rotate(q, k, v, layer)
    weights = F.dropout(attention_weights(q, k, terms, content, normaliser), dropout)
    out = positions.unrotate(weights @ v, layer)
    value = positions.value(weights, layer)
    return out if value is None else out + value


def blocked(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, layer: Layer, normaliser: str, dropout: float
) -> Tensor:
    """For CPUs, under softmax: see `kernels.BlockedAttention`."""

    def mix(q, k, v, terms):
        long = terms.bias is None and k.size(2) > kernels.LONG and not torch.is_grad_enabled() and dropout == 0
        if callable(terms.bias) or long:
            return attention_by_queries(q, k, v, terms.bias, terms.real, terms.scale)
        lengths = terms.packing.lengths if terms.window is None and q.size(2) == k.size(2) else None
        return blocked_attention(q, k, v, terms.bias, terms.real, terms.scale, dropout, lengths)

    return positions.unrotate(by_window(mix, *positions.rotate(q, k, v, layer), terms), layer)


def by_window(mix: Callable, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """mix(q, k, v, terms) [B, H, L, E], but under a window of the pairs that see each other alone."""
    if terms.window is None:
        return mix(q, k, v, terms)
    window = terms.window
    out = window.join(mix(window.split_queries(q), window.split_keys(k), window.split_keys(v), terms))
    if terms.of_cls is None:
        return out
    return torch.cat([mix(q[:, :, :1], k, v, terms.of_cls), out[:, :, 1:]], dim=2)


# Flash attention takes no bias, the memory-efficient kernel does, the plain one is for what both refuse. cuDNN's, which
# PyTorch >= 2.11 prefers on H100 and H200, is left out: with a mask its backward pass gives NaN where L % 128 = 64
# (pytorch/pytorch#196678), and it misreads float32 masks under bfloat16 (pytorch/pytorch#191612).
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, layer: Layer, normaliser: str, dropout: float
) -> Tensor:
    """PyTorch's fused kernels for GPUs. Those that compute the gradient of a bias read it in q's precision."""

    def mix(q, k, v, terms):
        bias = None if terms.bias is None else terms.bias.to(q.dtype)  # no copy: `Encoder.terms` converts it
        if bias is not None and bias.dim() == 3:
            bias = bias[None]  # the kernels accept masks of two or four dimensions
        with sdpa_kernel(BACKENDS):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=terms.scale)

    return positions.unrotate(by_window(mix, *positions.rotate(q, k, v, layer), terms), layer)


PATHS = {"plain": plain, "blocked": blocked, "sdpa": sdpa}


def choose(
    request: str, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """(path, reason) for a forward pass; request: a name from PATHS, or "auto".

    Raises ValueError, with the reason, if the requested path cannot compute what the model needs.
    """
    obstacle = why_not_fast(positions, normaliser, dtype)
    if request == "plain":
        return "plain", "as requested"
    if request == "auto":
        path = {"cpu": "blocked", "cuda": "sdpa"}.get(device.type, "plain")
        return ("plain", obstacle) if obstacle else (path, f"the default on {device.type}")
    if request not in PATHS:
        raise ValueError(f"unknown attention path {request!r}; valid: auto, {', '.join(PATHS)}")
    if request == "blocked" and device.type != "cpu":
        obstacle = f"it is for CPUs, not for {device.type}"
    if obstacle:
        raise ValueError(f"attention={request} is not possible: {obstacle}; valid here: auto, plain")
    return request, "as requested"


def why_not_fast(positions: Positions, normaliser: str, dtype: torch.dtype) -> str | None:
    """The reason why only the plain path computes this model, or None."""
    if normaliser != "softmax":
        return f"normaliser {normaliser} needs all weights"
    if any(overrides(scheme, "content", "gate", "value") for scheme in positions.of_layer(0)):
        return f"position {positions.name} has terms that need all weights"
    return f"{dtype} is for checks against the plain path" if dtype == torch.float64 else None
