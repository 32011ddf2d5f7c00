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
    first: bool = False  # of a layer of which the first query alone is wanted: the bias is [H, 1, L]

    def of_wanted(self, wanted: Tensor, positions: Positions) -> "Terms":
        """The terms of a layer of which these tokens alone are wanted, [n], places in the batch, of B L. Where they are
        first tokens, [CLS], the blocked path computes no other query's weights."""
        rotates_back = any(overrides(scheme, "unrotate") for scheme in positions.of_layer(0))
        if self.path != "blocked" or self.window is not None or callable(self.bias) or rotates_back:
            return self
        length = self.places.length
        if not torch.equal(wanted, torch.arange(0, len(wanted) * length, length)):
            return self
        return self._replace(first=True, bias=None if self.bias is None else self.bias[:, :1])


class TermsMaker:
    """Makes the `Terms` of the layers of one forward pass.

    Without padding the bias stays [H, L, L] and broadcasts over the batch. Under softmax, padding is merged into it,
    once, into a new tensor. Other normalisers get padding as a mask, because they do not turn low logits into 0; so
    does the blocked path, which then needs nothing of size B x H x L x L. GPU kernels read the bias in the queries'
    precision: it is rounded once, here, and not in every layer.
    """

    def __init__(
        self, positions: Positions, normaliser: str, places: Places, path: str, packing: Packing, dtype: torch.dtype
    ):
        """path: a name from PATHS. dtype: of queries and keys."""
        if path == "blocked" and packing.by_length is not None:
            packing = packing.by_length
        self.positions, self.normaliser, self.places = positions, normaliser, places
        self.path, self.packing, self.dtype = path, packing, dtype
        self.real = None if packing.real is None else packing.real[:, None, None, :]  # [B, 1, 1, L]

    def make(self, reach: int | None, bias: Tensor | Callable | None, gate: Tensor | None) -> Terms:
        """A layer's terms. reach: how far its queries see, None: everything. bias, gate: as in `Terms`, [H, L, L], for
        a batch without padding."""
        return self.everything(bias, gate, self.real) if reach is None else self.within(reach, bias, gate)

    def everything(self, bias: Tensor | Callable | None, gate: Tensor | None, seen: Tensor | None) -> Terms:
        """seen: `real`, or [B or 1, 1, L, L], the keys that each query sees."""
        if self.path == "sdpa" and bias is not None:
            bias = bias.to(self.dtype)
        if seen is None or self.normaliser != "softmax" or self.path == "blocked":
            return Terms(self.positions.scale, bias, gate, seen, self.path, self.packing, self.places)
        bias = mask_logits(bias, seen)
        return Terms(self.positions.scale, bias, gate, None, self.path, self.packing, self.places)

    def within(self, reach: int, bias: Tensor | Callable | None, gate: Tensor | None) -> Terms:
        window = Chunks(self.places, reach, self.positions.untie_cls)
        if self.path != "plain" and (window.pays or callable(bias)):
            return self.in_chunks(window, bias)
        near = self.places.near(reach)  # [L, L]
        if self.positions.untie_cls:
            near[0] = near[:, 0] = True
        if self.path == "blocked":
            return self.everything(mask_logits(bias, near), gate, self.real)
        if self.real is not None:  # a query of padding without a key would become NaN, so it sees itself
            near = near & self.real | torch.eye(len(near), dtype=torch.bool, device=near.device)
        return self.everything(bias, gate, near.expand(len(near) if near.dim() == 4 else 1, 1, -1, -1))

    def in_chunks(self, window: Chunks, bias: Tensor | Callable | None) -> Terms:
        parts = window.split_bias(bias)  # [H n or n, c, K]
        seen = None if self.real is None else window.split_real(self.real)  # [B, n, 1, K]
        if self.path == "sdpa":
            heads, parts = self.positions.dims.heads, parts.to(self.dtype)
            if len(parts) == window.chunks:
                parts = parts.repeat(heads, 1, 1)
            if seen is not None:
                seen = seen.repeat(1, heads, 1, 1)
                parts, seen = parts.masked_fill(~seen, torch.finfo(parts.dtype).min), None  # [B, H n, c, K]
        of_cls = None
        if self.positions.untie_cls:
            of_cls = bias(0, 1) if callable(bias) else None if bias is None else bias[:, :1]
            of_cls = self.everything(of_cls, None, self.real)
        return Terms(self.positions.scale, parts, None, seen, self.path, self.packing, self.places, window, of_cls)


def mask_logits(bias: Tensor | None, seen: Tensor) -> Tensor:
    """bias [H, L, L], or None for 0, with the lowest number where `seen` ([L, L], or [B, 1, 1 or L, L]) is False:
    softmax makes 0 of it, as of -inf, but not NaN of a sequence that is all padding."""
    bias = seen.new_zeros(1, 1, 1, dtype=torch.float32) if bias is None else bias
    return bias.masked_fill(~seen, torch.finfo(bias.dtype).min)  # [H or 1, L or 1, L] or [B, H or 1, L or 1, L]


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

    q, k, v = positions.rotate(q, k, v, layer)
    q = q[:, :, :1] if terms.first else q
    return positions.unrotate(by_window(mix, q, k, v, terms), layer)


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
