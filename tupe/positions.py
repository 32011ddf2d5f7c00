"""Position encodings for bidirectional attention: one small interface, a registry, and composition by name.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, N layers. Position i = 0 is [CLS]; the
offset of key j from query i is j - i. Attention logits are

    logits = (q . k + content) * scale + bias,    scale = 1 / sqrt((1 + extra_terms) D)

A scheme is one class that fills in the hooks it needs; a hook that is not filled in costs nothing. Schemes compose:
`untied+t5`. Those of the literature are in `schemes.py`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import autocast_device

SCHEMES = {}


def register(name):
    """Class decorator: make a scheme available as `--position NAME`."""

    def add(cls):
        if name in SCHEMES:
            raise ValueError(f"position scheme {name!r} is registered twice: {SCHEMES[name]} and {cls}")
        SCHEMES[name] = cls
        return cls

    return add


@dataclass(frozen=True)
class Dims:
    """Sizes a scheme may need. value_dim is the width E of one value head: D, but for gated attention units."""

    max_positions: int  # longest L
    width: int  # C
    heads: int  # H
    layers: int  # N
    head_dim: int  # D
    value_dim: int  # E


class PositionScheme(nn.Module):
    """Base class of all schemes. Override any subset of the hooks; None means: no such term.

    embed, bias, cls_bias and gate run once per forward and are shared by all layers; the others see each layer's
    tensors.
    """

    extra_terms = 0  # logit terms beside q.k that share its scale

    def __init__(self, dims: Dims):
        super().__init__()

    def embed(self, length) -> Tensor | None:
        """[L, C], added to the token embeddings."""

    def bias(self, length, scale) -> Tensor | None:
        """[H, L, L], content-free logits, already multiplied by `scale` where the paper does so."""

    def cls_bias(self, scale) -> Tensor | None:
        """[2, H], logits from [CLS] and to [CLS] when [CLS] is untied from positions."""

    def content(self, q, k, layer) -> Tensor | None:
        """[B, H, L, L], logits that need one layer's q and k, [B, H, L, D] each; not yet multiplied by the scale."""

    def gate(self, length) -> Tensor | None:
        """[H, L, L], multiplies the normalised weights."""

    def value(self, weights, layer) -> Tensor | None:
        """[B, H, L, E], added to the mixed values; weights: [B, H, L, L]."""

    def rotate(self, q, k, v):
        """q, k [B, H, L, D] and v [B, H, L, E], each multiplied by a matrix of its position."""
        return q, k, v

    def unrotate(self, out):
        """[B, H, L, E]: undoes at each query's position what `rotate` did to the values."""
        return out


def overrides(scheme, *hooks):
    """Whether the scheme (class or instance) fills in any of the hooks."""
    kind = scheme if isinstance(scheme, type) else type(scheme)
    return any(getattr(kind, hook) is not getattr(PositionScheme, hook) for hook in hooks)


class Positions(nn.ModuleDict):
    """The schemes of one model, by name (a checkpoint key reads `positions.untied.table.weight`), and everything they
    share.

    names: scheme names joined by "+", for example "untied+t5". A scheme is shared by all layers; "shaw:layer" gives
    each layer its own copy. cls: "tied", or "untied" to take [CLS] out of all position terms: the content-free logits
    from and to [CLS] become learned constants theta (TUPE, equation 10; reset once, in the sum of all schemes),
    content and value terms 0, gates 1. Raises ValueError, with the reason, for an unknown or repeated name and for a
    combination without meaning.
    """

    def __init__(self, names: str, dims: Dims, cls: str = "tied"):
        parts = {}  # name -> whether every layer has its own
        for part in names.split("+"):
            name, _, suffix = part.partition(":")
            if name not in SCHEMES:
                valid = ", ".join(sorted(SCHEMES))
                raise ValueError(f"unknown position scheme {name!r} in {names!r}; valid, joined by '+': {valid}")
            if suffix not in ("", "layer"):
                raise ValueError(f"unknown suffix {suffix!r} in {names!r}; valid: 'layer' (each layer its own)")
            if name in parts:
                raise ValueError(f"position scheme {name!r} is repeated in {names!r}")
            parts[name] = suffix == "layer"
        parts = {name: parts[name] for name in SCHEMES if name in parts}  # one spelling per combination
        refuse_nonsense(names, parts, cls)

        super().__init__()
        for name, per_layer in parts.items():
            scheme = SCHEMES[name]
            self[name] = nn.ModuleList(scheme(dims) for _ in range(dims.layers)) if per_layer else scheme(dims)
            if per_layer and not any(True for _ in self[name].parameters()):
                raise ValueError(f"position={names}: {name} has no parameters; it cannot be per layer")
        self.dims = dims
        self.name = "+".join(name + ":layer" * per_layer for name, per_layer in parts.items())
        self.per_layer = any(parts.values())
        self.untie_cls = cls == "untied"
        if self.untie_cls and not any(overrides(SCHEMES[name], "cls_bias") for name in parts):
            self.theta = nn.Parameter(torch.randn(2, dims.heads) * 0.02)
        self.scale = 1 / math.sqrt((1 + sum(SCHEMES[name].extra_terms for name in parts)) * dims.head_dim)

    def of_layer(self, layer):
        """The schemes that act in one layer."""
        return [m[layer] if isinstance(m, nn.ModuleList) else m for m in self.values()]

    def _sum(self, schemes, hook, *args):
        terms = [term for scheme in schemes if (term := getattr(scheme, hook)(*args)) is not None]
        return sum(terms[1:], terms[0]) if terms else None

    def embed(self, length):
        """[L, C] or None."""
        if length > self.dims.max_positions:
            raise ValueError(f"a sequence of {length} tokens exceeds the limit of {self.dims.max_positions} positions")
        return self._sum(self.of_layer(0), "embed", length)

    def terms(self, length):
        """N pairs (bias, gate), [H, L, L] float32 or None each. Without per-layer schemes all pairs are one and the
        same.

        Always computed in float32, whatever the precision of the rest: rounding here would be shared by every layer.
        """
        device = next((p.device.type for p in self.parameters()), "cpu")
        with torch.autocast(autocast_device(device), enabled=False):
            shared = [m for m in self.values() if not isinstance(m, nn.ModuleList)]
            bias, gate = self._bias_and_gate(shared, length, None, None)
            if not self.per_layer:
                return [(self._reset_bias(bias, shared, length), self._reset_gate(gate))] * self.dims.layers
            pairs = []
            for layer in range(self.dims.layers):
                own = [m[layer] for m in self.values() if isinstance(m, nn.ModuleList)]
                layer_bias, layer_gate = self._bias_and_gate(own, length, bias, gate)
                pairs.append((self._reset_bias(layer_bias, self.of_layer(layer), length), self._reset_gate(layer_gate)))
            return pairs

    def _bias_and_gate(self, schemes, length, bias, gate):
        for scheme in schemes:
            term, factor = scheme.bias(length, self.scale), scheme.gate(length)
            if term is not None:
                bias = term if bias is None else bias + term
            if factor is not None:
                gate = factor if gate is None else gate * factor
        return bias, gate

    # [CLS] is i = 0. Out of place: the inputs may be views of parameters.
    def _reset_bias(self, bias, schemes, length):
        if not self.untie_cls:
            return bias
        theta = self._sum(schemes, "cls_bias", self.scale) if not hasattr(self, "theta") else self.theta.float()
        from_cls, to_cls = theta[:, :, None, None]  # [H, 1, 1] each
        if bias is None:
            bias = theta.new_zeros(self.dims.heads, length, length)
        to_cls = to_cls.expand(-1, length - 1, 1)
        from_cls = from_cls.expand(-1, 1, length)  # includes [CLS] to [CLS]
        return torch.cat([from_cls, torch.cat([to_cls, bias[:, 1:, 1:]], dim=2)], dim=1)

    def _off_cls(self, x, value=0.0):
        """x [..., L, L] with `value` wherever the query or the key is [CLS], if [CLS] is untied."""
        return F.pad(x[..., 1:, 1:], (1, 0, 1, 0), value=value) if self.untie_cls and x is not None else x

    def _reset_gate(self, gate):
        return self._off_cls(gate, 1.0)

    def content(self, q, k, layer):
        """[B, H, L, L] or None."""
        return self._off_cls(self._sum(self.of_layer(layer), "content", q, k, layer))

    def value(self, weights, layer):
        """[B, H, L, E] or None."""
        schemes = [s for s in self.of_layer(layer) if overrides(s, "value")]
        return self._sum(schemes, "value", self._off_cls(weights), layer) if schemes else None

    def rotate(self, q, k, v):
        for scheme in self.values():
            if not isinstance(scheme, nn.ModuleList):
                q, k, v = scheme.rotate(q, k, v)
        return q, k, v

    def unrotate(self, out):
        for scheme in self.values():
            if not isinstance(scheme, nn.ModuleList):
                out = scheme.unrotate(out)
        return out


def refuse_nonsense(names, parts, cls):
    """Raise ValueError for combinations that have no meaning. parts: scheme name -> per layer or not."""
    if cls not in ("tied", "untied"):
        raise ValueError(f"cls must be 'tied' or 'untied', not {cls!r}")
    rotating = [name for name in parts if overrides(SCHEMES[name], "rotate")]
    if "nopos" in parts and len(parts) > 1:
        raise ValueError(f"position={names}: nopos means no position information and cannot be combined")
    if len(rotating) > 1:
        raise ValueError(f"position={names}: {' and '.join(rotating)} would both rotate the same queries and keys")
    for name in (name for name, per_layer in parts.items() if per_layer):
        if overrides(SCHEMES[name], "embed", "rotate"):
            raise ValueError(f"position={names}: {name} acts on the input or rotates; it cannot be per layer")
        if getattr(SCHEMES[name], "own_projections", False):
            raise ValueError(f"position={names}: {name} has projections of its own in every layer already")
    if cls == "untied":
        if rotating:
            raise ValueError(f"cls=untied with position={names}: {rotating[0]} rotates q and k, it has no term to drop")
        if not any(overrides(SCHEMES[name], "bias", "content", "gate", "value") for name in parts):
            raise ValueError(f"cls=untied with position={names}: attention has no position term to untie [CLS] from")
