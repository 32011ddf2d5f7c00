"""Attention with every position term: the plain path, which reads like the formulas and is the oracle of every faster
one.

B batch, L sequence length, H heads, D width of a head, E width of a value head (D, but for gated attention units).

    weights = normaliser((q . k + content) * scale + bias) * gate            [B, H, L, L]
    out     = weights v + value(weights)                                     [B, H, L, E]
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Terms(NamedTuple):
    """What attention needs beside q, k and v and does not depend on them; made once per forward (see
    `Encoder.terms`)."""

    scale: float
    bias: Tensor | None = None  # [H, L, L], or [B, H, L, L] with -inf at padded keys; float32
    gate: Tensor | None = None  # [H, L, L]
    real: Tensor | None = None  # [B, 1, 1, L], False at padded keys; only for normalisers other than softmax


def softmax(logits, real):
    return torch.softmax(logits, dim=-1)


def l2(logits, real):
    """e^b / sqrt(sum e^2b): the weights of a row have unit Euclidean norm (Su, 2022)."""
    if real is not None:
        logits = logits.masked_fill(~real, float("-inf"))
    return torch.exp(logits - torch.logsumexp(2 * logits, dim=-1, keepdim=True) / 2)


def exp(logits, real):
    """e^b, no denominator."""
    return mask(torch.exp(logits), real)


def relu2(logits, real):
    """relu(b)^2 / n with n real keys (GAU: Hua et al., 2022)."""
    n = logits.size(-1) if real is None else real.sum(-1, keepdim=True)
    return mask(torch.relu(logits).square() / n, real)


def swish_l2(logits, real):
    """b sigmoid(b), each row divided by its Euclidean norm."""
    return F.normalize(mask(F.silu(logits), real), dim=-1)


def mask(weights, real):
    return weights if real is None else weights.masked_fill(~real, 0)  # exactly 0 at padding


NORMALISERS = {"softmax": softmax, "l2": l2, "exp": exp, "relu2": relu2, "swish_l2": swish_l2}


def attention_weights(q, k, terms, content=None, normaliser="softmax"):
    """Gated weights [B, H, L, L] in q's dtype; q, k: [B, H, L, D], content: [B, H, L, L]. Everything after q . k in
    float32 (or float64, if that is the model's)."""
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


def attend(q, k, v, positions, terms, layer, normaliser="softmax", dropout=0.0):
    """Mix the values v [B, H, L, E] -> [B, H, L, E]. dropout: probability, already 0 outside training."""
    content = positions.content(q, k, layer)
    q, k, v = positions.rotate(q, k, v)
    weights = F.dropout(attention_weights(q, k, terms, content, normaliser), dropout)
    out = positions.unrotate(weights @ v)
    value = positions.value(weights, layer)
    return out if value is None else out + value
