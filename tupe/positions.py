"""Position encodings for bidirectional attention: one small interface, a registry, and composition by name.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, N layers. Position i = 0 is [CLS]; the
offset of key j from query i is j - i. Attention logits are

    logits = (q . k + content) * scale + bias,    scale = 1 / sqrt((1 + extra_terms) D)

A scheme is one class that fills in the hooks it needs; a hook that is not filled in costs nothing. Schemes compose:
`untied+t5`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """Sizes a scheme may need: L_max (max_positions), C (width), H (heads), N (layers)."""

    max_positions: int
    width: int
    heads: int
    layers: int

    @property
    def head_dim(self):
        return self.width // self.heads


class PositionScheme(nn.Module):
    """Base class of all schemes. Override any subset of the hooks; None means: no such term.

    Hooks run once per forward and are shared by all layers, except `content`, which sees each layer's q and k.
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


def overrides(scheme, hook):
    """Whether the scheme fills in the hook."""
    return getattr(type(scheme), hook) is not getattr(PositionScheme, hook)


def toeplitz(by_offset, length):
    """[..., 2L - 1] values for offsets -(L-1) .. L-1 -> [..., L, L] with entry (i, j) = value of offset j - i."""
    return by_offset.unfold(-1, length, 1).flip(-2)


class Positions(nn.ModuleDict):
    """The schemes of one model, by name (a checkpoint key reads `positions.untied.table.weight`), and everything they
    share.

    names: scheme names joined by "+", for example "untied+t5". cls: "tied", or "untied" to replace the content-free
    logits from and to [CLS] by learned constants theta (TUPE, equation 10). The reset is applied once, to the sum of
    all schemes. Raises ValueError for an unknown or repeated name and for an untied [CLS] that no scheme gives a
    meaning to.
    """

    def __init__(self, names: str, dims: Dims, cls: str = "tied"):
        parts = names.split("+")
        unknown = [name for name in parts if name not in SCHEMES]
        if unknown:
            valid = ", ".join(sorted(SCHEMES))
            raise ValueError(f"unknown position scheme {unknown[0]!r} in {names!r}; valid, joined by '+': {valid}")
        if len(set(parts)) < len(parts):
            raise ValueError(f"a position scheme is repeated in {names!r}")
        if cls not in ("tied", "untied"):
            raise ValueError(f"cls must be 'tied' or 'untied', not {cls!r}")
        parts.sort(key=list(SCHEMES).index)  # one spelling per combination
        super().__init__({name: SCHEMES[name](dims) for name in parts})
        self.dims = dims
        self.settings = f"position={'+'.join(parts)} cls={cls}"
        self.untie_cls = cls == "untied"
        if self.untie_cls and not any(overrides(s, "bias") for s in self.values()):
            raise ValueError(f"cls=untied has no meaning for position={names}: there are no content-free logits")
        self.scale = 1 / math.sqrt((1 + sum(s.extra_terms for s in self.values())) * dims.head_dim)

    def _sum(self, hook, *args):
        terms = [term for scheme in self.values() if (term := getattr(scheme, hook)(*args)) is not None]
        return sum(terms[1:], terms[0]) if terms else None

    def embed(self, length):
        """[L, C] or None."""
        if length > self.dims.max_positions:
            raise ValueError(f"a sequence of {length} tokens exceeds the limit of {self.dims.max_positions} positions")
        return self._sum("embed", length)

    def bias(self, length):
        """[H, L, L] float32 or None: the content-free logits of all schemes, with [CLS] reset where it is untied.

        Always computed in float32, whatever the precision of the rest: rounding here would be shared by every layer.
        """
        device = next((p.device.type for p in self.parameters()), "cpu")
        with torch.autocast(device, enabled=False):
            bias = self._sum("bias", length, self.scale)
            if self.untie_cls:
                from_cls, to_cls = self._sum("cls_bias", self.scale)[:, :, None, None]  # [H, 1, 1] each
                from_cls = from_cls.expand(-1, 1, length)  # includes [CLS] to [CLS]
                to_cls = to_cls.expand(-1, length - 1, 1)
                bias = torch.cat([from_cls, torch.cat([to_cls, bias[:, 1:, 1:]], dim=2)], dim=1)
        return bias

    def content(self, q, k, layer):
        """[B, H, L, L] or None."""
        return self._sum("content", q, k, layer)

    # The settings travel in the state dict, so that loading a checkpoint into a contradicting model fails even where
    # both have the same parameters (or none). An integer tensor, because weights-only loading and checkpoint averaging
    # accept it.
    def get_extra_state(self):
        return torch.tensor(list(self.settings.encode()), dtype=torch.long)

    def set_extra_state(self, state):
        saved = bytes(state.tolist()).decode()
        if saved != self.settings:
            raise ValueError(f"the checkpoint was trained with {saved}, this model is built with {self.settings}")


@register("nopos")
class NoPosition(PositionScheme):
    """No position information at all; the encoder becomes permutation-equivariant."""


@register("absolute")
class Absolute(PositionScheme):
    """BERT (Devlin et al., 2019): learned vectors added to the token embeddings, w_i + p_i."""

    def __init__(self, dims):
        super().__init__(dims)
        self.table = nn.Embedding(dims.max_positions, dims.width)

    def embed(self, length):
        return self.table.weight[:length]


@register("untied")
class Untied(PositionScheme):
    """TUPE (Ke et al., 2021), equations 7 and 10: (LN(p_i) U_Q) . (LN(p_j) U_K) * scale, shared by all layers.

    Row 0 of the table is p_theta1 (from [CLS]), row 1 is p_theta2 (to [CLS]), position i has row i + 1; so [CLS]'s own
    position, used only where [CLS] is tied, is row 1. U_Q and U_K have biases, as in the released code.
    """

    extra_terms = 1

    def __init__(self, dims):
        super().__init__(dims)
        self.heads = dims.heads
        self.table = nn.Embedding(dims.max_positions + 1, dims.width)
        self.norm = nn.LayerNorm(dims.width)
        self.q = nn.Linear(dims.width, dims.width)
        self.k = nn.Linear(dims.width, dims.width)

    def project(self, start, end):
        """Queries and keys of table rows start..end in float32, [H, rows, D] each."""
        norm, rows = self.norm, self.table.weight[start:end].float()
        rows = F.layer_norm(rows, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
        projected = (F.linear(rows, u.weight.float(), u.bias.float()) for u in (self.q, self.k))  # [rows, C]
        return [x.unflatten(1, (self.heads, -1)).transpose(0, 1) for x in projected]

    def bias(self, length, scale):
        q, k = self.project(1, length + 1)
        return (q * scale) @ k.transpose(1, 2)

    def cls_bias(self, scale):
        q, k = self.project(0, 2)
        return (q * k).sum(2).T * scale  # [2, H]


@register("absolute_d")
class AbsoluteDisentangled(Untied):
    """BERT-A^d (TUPE, section 3.2): all four word and position terms, the positions with projections of their own.

    x_i W_Q . x_j W_K + x_i W_Q . p_j U_K + p_i U_Q . x_j W_K + p_i U_Q . p_j U_K, all over sqrt(4D). Beside `untied`
    it has the two middle terms and another scale, nothing else.
    """

    extra_terms = 3

    def content(self, q, k, layer):
        pos_q, pos_k = (p.to(q.dtype) for p in self.project(1, q.size(2) + 1))  # [H, L, D]
        return q @ pos_k.transpose(1, 2) + pos_q @ k.transpose(2, 3)


@register("t5")
class T5(PositionScheme):
    """T5 (Raffel et al., 2020) as TUPE-R uses it: a learned scalar per head and bucket of the offset, not scaled.

    Bidirectional, 32 buckets, distances from 128 on share one. Bucket 16 (offset 0 counted as positive) never occurs,
    so its row is theta1 (from [CLS]); an extra row 32 is theta2 (to [CLS]).
    """

    buckets, max_distance = 32, 128

    def __init__(self, dims):
        super().__init__(dims)
        self.table = nn.Embedding(self.buckets + 1, dims.heads)
        offsets = torch.arange(1 - dims.max_positions, dims.max_positions)
        self.register_buffer("bucket", self.bucket_of(offsets), persistent=False)  # [2 L_max - 1]

    @classmethod
    def bucket_of(cls, offset):
        """Bucket of each offset: half of the buckets per sign; of those, half for exact distances, half spaced
        logarithmically."""
        half, exact = cls.buckets // 2, cls.buckets // 4
        distance = offset.abs()
        # float32 on purpose: bfloat16 would move the borders
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(cls.max_distance / exact)
        far = (exact + (log * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(distance < exact, distance, far) + half * (offset > 0)

    def bias(self, length, scale):
        middle = self.bucket.size(0) // 2
        by_offset = self.table(self.bucket[middle - length + 1 : middle + length])  # [2L - 1, H]
        return toeplitz(by_offset.float().T, length)

    def cls_bias(self, scale):
        return self.table.weight[[self.buckets // 2, self.buckets]].float()
