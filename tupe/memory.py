"""How much GPU memory a training step takes, counted without a GPU.

B batch, L sequence length, H heads. Tensors that autograd keeps for the backward pass are counted on PyTorch's meta
device, which knows sizes but holds no data. Attention is counted as the fused kernel that a GPU runs: it keeps q, k, v,
its output and one number per query, not the [B, H, L, L] weights.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

from . import attention, encoder

# Per parameter in fairseq's --fp16: half-precision weight and gradient, single-precision weight and gradient, and
# Adam's two moments.
STATE_BYTES = 2 + 2 + 4 + 4 + 4 + 4


class Fused(torch.autograd.Function):
    """The sizes, not the values, of fused attention: what it keeps, and a bias gradient for every sequence."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        out, per_query = torch.empty_like(v), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, bias, out, per_query)
        return out

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def fused(q, k, v, positions, terms, layer, normaliser, dropout):
    q, k, v = positions.rotate(q, k, v)
    return positions.unrotate(Fused.apply(q, k, v, terms.bias.to(q.dtype) if terms.bias is not None else None))


class Dropout(torch.autograd.Function):
    """The sizes of dropout on a GPU: it keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


@contextmanager
def counting():
    """Run models on the meta device as a GPU would; it has no autocast to switch off."""
    with (
        mock.patch.dict(attention.PATHS, {"sdpa": fused}),
        mock.patch.object(encoder, "dropout", lambda x, p, training: Dropout.apply(x) if training and p else x),
        mock.patch.object(torch, "autocast", lambda *args, **options: nullcontext()),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: False),
    ):
        yield


def step_bytes(arch, batch, length, vocabulary=32768, checkpoint_activations=False):
    """{"parameters": count, "state": bytes, "activations": bytes, "transient": bytes} of masked-LM training in --fp16.

    activations: kept from forward to backward. transient: the largest that one moment needs besides, which is the
    attention bias's gradient of one layer (or, with checkpoint_activations, what is inside one layer), and the logits
    of 15 % masked tokens in single precision with their gradient.
    Raises ValueError for an architecture that does not exist, or that needs the plain path.
    """
    if arch not in MODEL_REGISTRY or not arch.startswith(("tupe_", "bert_")):
        raise ValueError(f"unknown architecture {arch!r} for masked-LM training")
    words = Dictionary()
    words.symbols.extend(f"w{n}" for n in range(vocabulary - len(words)))
    words.indices.update({symbol: n for n, symbol in enumerate(words.symbols)})
    config = MODEL_DATACLASS_REGISTRY[arch](max_positions=length)
    with torch.device("meta"):
        model = MODEL_REGISTRY[arch](config, words).half().train()
        tokens = torch.zeros(batch, length, dtype=torch.long)
    body = model.encoder
    lack = attention.why_not_fast(body.positions, body.normaliser, torch.float16)
    if lack:
        raise ValueError(f"{arch}: {lack}; only fused attention is counted")
    body.attention = "sdpa"
    with counting():
        x, outside = kept(model, lambda: body.embed(tokens))
        terms, of_bias = kept(model, lambda: body.terms(tokens, "sdpa", padded=False))
        x, in_layer = kept(model, lambda: body.layers[0](x, body.positions, terms[0], 0))
    layers = len(body.layers)
    masked = int(0.15 * batch * length)
    bias_gradient = 2 * batch * body.positions.dims.heads * length**2
    logits = 2 * 4 * masked * vocabulary
    boundary = x.numel() * x.element_size()
    inside = layers * (boundary if checkpoint_activations else in_layer)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "state": STATE_BYTES * parameters,
        "activations": outside + of_bias + inside,
        "transient": max(logits, bias_gradient + (in_layer if checkpoint_activations else 0)),
    }


def kept(model, forward):
    """(result of forward(), bytes that autograd keeps of it, the model's own tensors left out)."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    seen = {}

    def remember(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage  # keeps it alive: a freed one's address could come again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        result = forward()
    return result, sum(storage.nbytes() for storage in seen.values())
