"""Attention with every position term: the formula, once, and the plain backend, which tests compare every faster one
with. `backends.py` chooses.

B batch, L sequence length, H heads, D width of a head, E width of a value head.

    weights = normaliser((q . k + content) * scale + bias) * gate            [B, H, L, L]
    out     = weights v + value(weights)                                     [B, H, L, E]
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import NO_PADDING, Packing
from .positions import LayerContext, Positions
from .token_positions import TokenPositions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    prepared: Any,
    layer: LayerContext,
    backend: "Backend",
    dropout: float = 0.0,
) -> Tensor:
    """Mix the values v [B, H, L, E] -> [B, H, L, E]; q, k: [B, H, L, D].

    prepared: what `backend.prepare` made for this layer. dropout: probability, which the caller sets to 0 outside
    training.
    """
    content = positions.content(q, k, layer)  # [B, H, L, L] or None
    q, k, v = positions.rotate(q, k, v, layer)
    out, weights = backend.mix(q, k, v, content, prepared, positions.scale, dropout)
    out = positions.unrotate(out, layer)
    value = positions.value(weights, layer)
    return out if value is None else out + value


class Batch(NamedTuple):
    """A batch, as backends see it once per forward pass."""

    token_positions: TokenPositions  # where the tokens stand
    dtype: torch.dtype  # of queries and keys
    heads: int
    packing: Packing = NO_PADDING  # where padding is, in the order of `Backend.order`
    untie_cls: bool = False  # [CLS] sees all and is seen by all, whatever the window

    @property
    def key_mask(self) -> Tensor | None:
        """[B, 1, 1, L], False at padding; None: there is none."""
        return None if self.packing.mask is None else self.packing.mask[:, None, None, :]

    def near(self, reach: int, queries: TokenPositions | None = None) -> Tensor:
        """[R, L], whether a query sees a key under a window. queries: a block of them, None: all."""
        queries = queries or self.token_positions
        near = queries.near(reach)
        if self.untie_cls:
            near[:, 0] = True
            if queries.first == 0:
                near[0] = True
        return near

    def seen(self, reach: int | None) -> Tensor | None:
        """[B or 1, 1, 1 or L, L], whether a query sees a key; None: all see all."""
        if reach is None:
            return self.key_mask
        near = self.near(reach)
        if self.key_mask is not None:  # a query of padding without a key would become NaN, so it sees itself
            place = torch.arange(self.token_positions.length, device=near.device)  # columns of padding share a position
            near = near & self.key_mask | (place == place[:, None])
        return near.expand(near.size(0) if near.dim() == 4 else 1, 1, -1, -1)


class Backend:
    """A way to compute attention: `prepare` once per forward pass and distinct position terms, `mix` in every layer.
    What a backend does to be fast stays inside of it."""

    name = ""

    def refuses(self, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """The reason why it cannot compute this model here, or None."""
        if normaliser != "softmax":
            return f"normaliser {normaliser} needs all weights"
        if any(positions.having[hook] for hook in ("content", "gate", "value")):
            return f"position {positions.name} has terms that need all weights"
        return f"{dtype} is for checks against the plain backend" if dtype == torch.float64 else None

    def order(self, packing: Packing) -> Packing:
        """The same tokens, with the sequences in the order in which `mix` takes them."""
        return packing

    def terms(self, positions: Positions, token_positions: TokenPositions) -> list[tuple[Any, Tensor | None]]:
        """A pair (bias, gate) for each layer, as `prepare` takes them."""
        return positions.terms(token_positions)

    def prepare(self, bias: Any, gate: Tensor | None, reach: int | None, batch: Batch) -> Any:
        """Whatever `mix` needs for a layer beside q, k and v. bias, gate: [H, L, L] float32, without regard to padding,
        or None; bias may also be what the backend's `terms` returns in its place. reach: how far queries see, None:
        everything."""
        raise NotImplementedError

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Any, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """(mixed values [B, H, L, E], weights [B, H, L, L] or None), both after dropout."""
        raise NotImplementedError


class Prepared(NamedTuple):
    """The result of `prepare` for most backends."""

    bias: Tensor | None = None  # [H, L, L], or [B, H, L, L] with the lowest number at keys that a query does not see
    gate: Tensor | None = None  # [H, L, L]
    key_mask: Tensor | None = None  # [B or 1, 1, 1 or L, L], False at keys that the bias does not exclude


class Plain(Backend):
    """Every scheme, every normaliser, every device: the oracle of all others."""

    name = "plain"

    def __init__(self, normaliser: str = "softmax"):
        self.normaliser = normaliser

    def refuses(self, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype) -> None:
        return None

    def prepare(self, bias: Tensor | None, gate: Tensor | None, reach: int | None, batch: Batch) -> Prepared:
        """Without padding the bias stays [H, L, L] and broadcasts over the batch. Under softmax the mask is merged into
        it; other normalisers do not turn low logits into 0."""
        seen = batch.seen(reach)
        if seen is not None and self.normaliser == "softmax":
            bias, seen = mask_logits(bias, seen), None
        return Prepared(bias, gate, seen)

    def weights(self, q: Tensor, k: Tensor, content: Tensor | None, prepared: Prepared, scale: float) -> Tensor:
        """Gated weights [B, H, L, L] in q's dtype; q, k: [B, H, L, D], content: [B, H, L, L]. Everything after q . k is
        computed in float32 (or in float64, if the model is)."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = ((q * scale) @ k.transpose(2, 3)).to(dtype)
        if content is not None:
            logits = logits + content.to(dtype) * scale
        if prepared.bias is not None:
            logits = logits + prepared.bias
        weights = NORMALISERS[self.normaliser](logits, prepared.key_mask)
        if prepared.gate is not None:
            weights = weights * prepared.gate
        return weights.to(q.dtype)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Prepared, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor]:
        weights = F.dropout(self.weights(q, k, content, prepared, scale), dropout)
        return weights @ v, weights


class Recorder(Plain):
    """The plain backend, which keeps every layer's weights [B, H, L, L] and the two parts of their logits, both
    multiplied by the scale: the part of the words [B, H, L, L] and the part of the positions alone [H, L, L].
    They are those of the last forward pass. The one way to see weights:
    `encoder(tokens, backend=Recorder(encoder.normaliser))`."""

    def __init__(self, normaliser: str):
        super().__init__(normaliser)
        self.weights_of_layers: list[Tensor] = []
        self.words: list[Tensor] = []
        self.biases: list[Tensor | None] = []

    def terms(self, positions: Positions, token_positions: TokenPositions) -> list[tuple[Any, Tensor | None]]:
        pairs = super().terms(positions, token_positions)
        self.weights_of_layers, self.words, self.biases = [], [], [bias for bias, _ in pairs]  # of this forward pass
        return pairs

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: Prepared, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor]:
        words = ((q * scale) @ k.transpose(2, 3)).float()
        self.words.append(words if content is None else words + content.float() * scale)
        out, weights = super().mix(q, k, v, content, prepared, scale, dropout)
        self.weights_of_layers.append(weights)
        return out, weights

    def logits_of_layers(self) -> list[tuple[Tensor, Tensor]]:
        """(words, positions), [B, H, L, L] each."""
        zero = self.words[0].new_zeros(())
        biases = [zero if bias is None else bias for bias in self.biases]
        return [(words, bias.expand_as(words)) for words, bias in zip(self.words, biases, strict=True)]


def mask_logits(bias: Tensor | None, seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """bias [H, L, L], or None for 0 in this dtype, with a very low number where `seen` ([L, L], or [B, 1, 1 or L, L])
    is False: softmax makes 0 of it, as of -inf, but not NaN of a sequence that is all padding. Half the lowest number,
    because kernels multiply it by log2(e)."""
    bias = seen.new_zeros(1, 1, 1, dtype=dtype) if bias is None else bias
    return bias.masked_fill(~seen, torch.finfo(bias.dtype).min / 2)  # [H or 1, L or 1, L] or [B, H or 1, L or 1, L]


# Normalisers: logits [B, H, L, L] and key_mask [B or 1, 1, 1 or L, L] or None -> weights.


def softmax(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    return torch.softmax(logits, dim=-1)


def l2(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """e^b / sqrt(sum e^2b): the weights of a row have unit Euclidean norm (Su, 2022)."""
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask, torch.finfo(logits.dtype).min / 4)  # finite when doubled
    return torch.exp(logits - torch.logsumexp(2 * logits, dim=-1, keepdim=True) / 2)


def exp(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """e^b, without a denominator."""
    return mask(torch.exp(logits), key_mask)


def relu2(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """relu(b)^2 / n with n real keys, after GAU (Hua et al., 2022)."""
    n = logits.size(-1) if key_mask is None else key_mask.sum(-1, keepdim=True).clamp(min=1)
    return mask(torch.relu(logits).square() / n, key_mask)


def swish_l2(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """b sigmoid(b), each row divided by its Euclidean norm."""
    return F.normalize(mask(F.silu(logits), key_mask), dim=-1)


def mask(weights: Tensor, key_mask: Tensor | None) -> Tensor:
    return weights if key_mask is None else weights.masked_fill(~key_mask, 0)  # exactly 0 at padding


NORMALISERS = {"softmax": softmax, "l2": l2, "exp": exp, "relu2": relu2, "swish_l2": swish_l2}
