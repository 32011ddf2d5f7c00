"""Logits that depend on content: relative vectors against queries and keys; and relative vectors added to the values.

The letters are those of `positions.py`, whose `PositionScheme` documents the hooks. Tables of schemes show `paper` and
`formula`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .positions import Dims, LayerContext, PositionScheme, register
from .schemes_bias import Alibi
from .schemes_common import (
    Clipped,
    LayerNorm,
    LearnedFrequencies,
    Linear,
    Table,
    at_least,
    frequencies,
    in_float32,
    per_head,
    waves,
)
from .token_positions import TokenPositions


class RelativeVectors(Clipped):
    """Base of Shaw et al. (2018): a vector r per clipped offset, shared by all heads. Offsets are clipped at 64, in
    `shaw_values` too (our choice; their base model has 16)."""

    numbered = False

    def vectors(self, positions: TokenPositions) -> Tensor:
        """[2S - 1, D], of every offset."""
        raise NotImplementedError

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        x = q @ self.vectors(layer.positions).to(q.dtype).T  # [B, H, L, 2S - 1]
        return layer.positions.select(x)


@register("shaw")
class Shaw(RelativeVectors):
    """Relative vectors added to the keys (Shaw et al., 2018; the fully learnable RPE of Wang et al., 2021).

    One table serves all layers and heads. In Shaw et al. each layer has its own (shaw:layer), in their base model each
    head too.
    """

    paper, formula = "Shaw et al. 2018", "q_i . r_{clip(j - i)} / sqrt(D)"

    def __init__(self, dims: Dims, max_distance: int = 64):
        super().__init__(dims, max_distance)
        self.table = Table(2 * max_distance + 1, dims.head_dim)

    def vectors(self, positions: TokenPositions) -> Tensor:
        return self.table(self.rows(positions))


@register("shaw_sinusoidal")
class ShawSinusoidal(RelativeVectors):
    """Relative vectors that are fixed sinusoids of the clipped offset (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "q_i . [sin, cos](omega clip(j - i)) / sqrt(D), omega fixed"

    def __init__(self, dims: Dims, max_distance: int = 64, amplitude: float = 1.0):
        super().__init__(dims, max_distance)
        self.amplitude = amplitude
        self.width = len(frequencies(dims.head_dim)) * 2

    def vectors(self, positions: TokenPositions) -> Tensor:
        clipped = torch.arange(-self.max_distance, self.max_distance + 1, device=positions.device)
        table = waves(frequencies(self.width, positions.device), clipped)
        return table[self.rows(positions)] * self.amplitude


@register("shaw_sinusoidal_learned")
class ShawSinusoidalLearned(LearnedFrequencies, RelativeVectors):
    """Relative vectors that are sinusoids of the clipped offset with learned frequencies (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "q_i . [sin, cos](omega clip(j - i)) / sqrt(D), omega learned"

    def __init__(self, dims: Dims, max_distance: int = 64, amplitude: float = 1.0):
        super().__init__(dims, max_distance)
        self.amplitude = amplitude
        self.start_frequencies(dims.head_dim)

    def vectors(self, positions: TokenPositions) -> Tensor:
        return waves(self.omega, self.rows(positions) - self.max_distance) * self.amplitude


@register("shaw_values")
class ShawValues(Clipped):
    """Shaw et al.'s second half: relative vectors added to the values, sum_j weights_ij r_{j-i}. Combine:
    shaw+shaw_values."""

    paper, formula = "Shaw et al. 2018", "o_i + sum_j a_ij r_{clip(j - i)}"
    numbered = False

    def __init__(self, dims: Dims, max_distance: int = 64):
        super().__init__(dims, max_distance)
        self.table = Table(2 * max_distance + 1, dims.value_dim)

    def value(self, weights: Tensor, layer: LayerContext) -> Tensor:
        rows = self.table(self.rows(layer.positions)).to(weights.dtype)  # [2S - 1, E]
        return layer.positions.collect(weights) @ rows


@register("deberta")
class Deberta(PositionScheme):
    """DeBERTa's disentangled attention (He et al., 2021): content-to-position and position-to-content terms.

    q_i . P[delta(i, j)] V_K + k_j . P[delta(j, i)] V_Q with delta(i, j) = clip(i - j + t, 0, 2t - 1), where t is
    max_distance: the paper's equation 4 (the authors' code has delta(i, j) in both terms). The table P is shared by all
    layers, the projections are each layer's own, without biases (V_Q has one in the authors' code). Theirs drop out
    entries of P in training.
    """

    paper, formula = "He et al. 2021", "(q_i . P_{i-j} V_K + k_j . P_{j-i} V_Q) / sqrt(3D)"
    extra_terms, own_projections = 2, True

    def __init__(self, dims: Dims, max_distance: int = 512):
        super().__init__(dims)
        self.heads, layers = dims.heads, dims.layers if self.own_projections else 1
        self.max_distance = at_least(1, max_distance=max_distance)
        self.table = Table(2 * max_distance, dims.width)
        self.q = nn.ModuleList(Linear(dims.width, dims.heads * dims.head_dim, bias=False) for _ in range(layers))
        self.k = nn.ModuleList(Linear(dims.width, dims.heads * dims.head_dim, bias=False) for _ in range(layers))

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        select, index = layer.positions.select, layer.index if self.own_projections else 0
        delta = self.max_distance - layer.positions.offsets  # falls with the offset j - i
        rows = self.table(delta.clamp(0, 2 * self.max_distance - 1))  # [2S - 1, C]
        pos_q = per_head(rows.float(), self.q[index], self.heads).to(q.dtype)  # [H, 2S - 1, D]
        pos_k = per_head(rows.float(), self.k[index], self.heads).to(q.dtype)
        to_position = select(q @ pos_k.transpose(1, 2))  # [B, H, L, L], entry (i, j)
        from_position = select(k @ pos_q.transpose(1, 2))  # entry (j, i)
        return to_position + from_position.transpose(2, 3)


@register("deberta_shared")
class DebertaShared(Deberta):
    """`deberta` with one pair of projections for all layers, as TUPE shares its own."""

    paper, formula = "He et al. 2021, shared", "as deberta, V_Q and V_K shared by all layers"
    own_projections = numbered = False


@register("deberta_v2")
class DebertaV2(PositionScheme):
    """DeBERTa v2 and v3 (He et al., 2023), LTG-BERT and GPT-BERT: `deberta` without projections of its own.

    q_i . K(P_{b(i-j)}) + k_j . Q(P_{b(i-j)}), where P is layer-normed, and Q and K are the layer's own W_Q and W_K with
    their biases. Both terms have the bucket of i - j, as in the authors' code (`deberta` follows a paper's equation).
    Buckets b: up to `buckets` / 2 one per offset, from there to max_distance - 1 as many again, spaced logarithmically
    and rounded up; further offsets share the last. LTG-BERT has 32 buckets. Theirs drop out entries of P in training.
    """

    paper, formula = "He et al. 2023", "(q_i . W_K P_{b(i-j)} + k_j . W_Q P_{b(i-j)}) / sqrt(3D)"
    extra_terms, numbered = 2, False

    def __init__(self, dims: Dims, buckets: int = 256, max_distance: int = 512):
        super().__init__(dims)
        if buckets < 4 or buckets % 2:
            raise ValueError(f"buckets must be an even number, at least 4, not {buckets}")
        if max_distance <= buckets // 2 + 1:
            raise ValueError(f"max_distance must be more than buckets / 2 + 1, not {max_distance}")
        self.buckets, self.max_distance = buckets, max_distance
        width = dims.input_width or dims.width
        self.table, self.norm = Table(2 * buckets - 1, width), LayerNorm(width)

    def bucket_of(self, offset: Tensor) -> Tensor:
        """-(buckets - 1) .. buckets - 1, with the sign of the offset."""
        middle = self.buckets // 2
        distance = offset.abs().clamp(max=self.max_distance - 1)
        # float32, because bfloat16 would move the borders
        log = torch.log(distance.clamp(min=1).float() / middle) / math.log((self.max_distance - 1) / middle)
        # at most the last one, which rounding may exceed
        far = (middle + torch.ceil(log * (middle - 1)).long()).clamp(max=self.buckets - 1)
        return torch.where(distance <= middle, offset, far * offset.sign())

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        rows = self.table(slice(None))  # [R, C]
        pos_q, pos_k, _ = layer.project(self.norm(rows).to(rows.dtype)[None])  # [1, H, R, D]
        row = self.bucket_of(layer.positions.offsets) + self.buckets - 1  # [2S - 1], by i - j
        to_position = layer.positions.select(q @ pos_k[0, :, row.flip(0)].transpose(1, 2))  # [B, H, L, L], entry (i, j)
        from_position = layer.positions.select(k @ pos_q[0, :, row].transpose(1, 2))  # entry (j, i)
        return to_position + from_position.transpose(2, 3)


@register("transformer_xl")
class TransformerXL(PositionScheme):
    """Transformer-XL (Dai et al., 2019): q_i . W_R R_{i-j} + u . k_j + v . W_R R_{i-j}.

    R are sinusoids of the offset, C wide and not clipped (XLNet has them for both signs). Every layer has its own
    W_R, without bias; u and v, one vector per head each, are shared by all layers (the authors' default). u . k_j does
    not depend on positions, but belongs to the encoding. Theirs drops out entries of R in training.
    """

    paper, formula = "Dai et al. 2019", "(q_i . W_R R_{i-j} + u . k_j + v . W_R R_{i-j}) / sqrt(D)"
    own_projections = True

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.heads, self.width = dims.heads, len(frequencies(dims.width)) * 2
        shape = dims.heads, dims.head_dim
        self.u, self.v = (nn.Parameter(torch.randn(shape) * 0.02) for _ in range(2))
        self.r = nn.ModuleList(Linear(dims.width, shape[0] * shape[1], bias=False) for _ in range(dims.layers))

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        rows = waves(frequencies(self.width, q.device), -layer.positions.offsets)  # [2S - 1, C], of i - j
        rows = per_head(rows, self.r[layer.index], self.heads).to(q.dtype)  # [H, 2S - 1, D]
        u, v = self.u[:, None].to(q.dtype), self.v[:, None].to(q.dtype)  # [H, 1, D]
        return layer.positions.select((q + v) @ rows.transpose(1, 2)) + u @ k.transpose(2, 3)


@register("wavelets")
class Wavelets(PositionScheme):
    """Relative vectors that are wavelets of the offset (Oka et al., 2025): column c of r is psi((j - i - b_c) / a_c)
    with Ricker's psi(t) = (1 - t^2) e^{-t^2 / 2}.

    The widths a are 2^0 .. 2^{scales - 1}; each has as many shifts b, one apart, as the head has columns for. Theirs
    begin at 0; here they are centred, because keys stand on both sides. No parameters.
    """

    paper, formula = "Oka et al. 2025", "q_i . psi((j - i - b) / a) / sqrt(D), psi Ricker's wavelet"
    numbered = False

    def __init__(self, dims: Dims, scales: int = 8):
        super().__init__(dims)
        self.scales, self.width = at_least(1, scales=scales), dims.head_dim

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        column = torch.arange(self.width, device=q.device)
        shift = column // self.scales - ((self.width - 1) // self.scales) / 2
        t = (layer.positions.offsets[:, None] - shift) / 2.0 ** (column % self.scales)  # [2S - 1, D]
        vectors = (1 - t.square()) * torch.exp(-t.square() / 2)
        return layer.positions.select(q @ vectors.to(q.dtype).T)


@register("cope")
class Cope(PositionScheme):
    """CoPE (Golovneva et al., 2024): every query chooses which tokens count, and how far a key is, is the number of
    those between them.

    p_ij is the sum of the gates sigmoid(q_i . k_m / sqrt(D)) over m from j to i, at most `positions` - 1; between two
    whole numbers, the logit is interpolated. All of it is over sqrt(D); in their code q_i . k_j is, and this term is
    not. Vectors e start at 0, as the authors'; their model is causal, ours has vectors for keys on the left and on the
    right. Each layer has its own in theirs: cope:layer.
    """

    paper, formula = (
        "Golovneva et al. 2024 (CoPE)",
        "q_i . e[p_ij] / sqrt(D), p_ij = sum_{m = j..i} sigmoid(q_i . k_m / sqrt(D))",
    )
    numbered = False

    def __init__(self, dims: Dims, positions: int = 64):
        super().__init__(dims)
        self.positions = at_least(2, positions=positions)
        self.table = nn.Parameter(torch.zeros(2, self.positions, dims.head_dim))  # left, right

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        gates = torch.sigmoid((q @ k.transpose(2, 3)).to(dtype) * q.size(-1) ** -0.5)  # [B, H, L, L]
        gates = layer.counted(gates.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # of keys
        to_left = gates.tril().flip(-1).cumsum(-1).flip(-1)  # j .. i
        to_right = gates.triu().cumsum(-1)  # i .. j
        index = torch.arange(q.size(2), device=q.device)
        on_right = index > index[:, None]  # [L, L]
        place = torch.where(on_right, to_right, to_left).clamp(max=self.positions - 1)
        logits = (q @ self.table.flatten(0, 1).to(q.dtype).T).to(dtype)  # [B, H, L, 2P]
        first = on_right * self.positions
        below, above = (logits.gather(-1, end.long() + first) for end in (place.floor(), place.ceil()))
        return below + (place - place.floor()) * (above - below)


@register("cable")
class Cable(PositionScheme):
    """CABLE (Veisi et al., 2025), and FoX's forget gates (Lin et al., 2025), with the other sign of w: each token adds
    softplus(w_h x + c_h) to the distance of all that it stands between, -|b_i - b_j| with b the sums up to a token.

    The later of two tokens counts, the earlier does not. x is the layer's input, w and c are each layer's own. FoX's
    gate of the output and norms of q and k are not part of it.
    """

    paper, formula = "Veisi et al. 2025 (CABLE)", "-|b_i - b_j|, b_i = sum_{l <= i} softplus(w_h x_l + c_h)"
    own_projections = True

    def __init__(self, dims: Dims):
        super().__init__(dims)
        inputs = dims.input_width or dims.width
        self.project = nn.ModuleList(Linear(inputs, dims.heads) for _ in range(dims.layers))

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        steps = F.softplus(in_float32(self.project[layer.index](layer.input())))
        place = layer.counted(steps).cumsum(1).transpose(1, 2)  # [B, H, L]
        distance = (place[..., :, None] - place[..., None, :]).abs()
        return -distance / layer.scale  # which attention multiplies by


@register("grape_a")
class GrapeA(PositionScheme):
    """GRAPE-A (Zhang et al., 2025), key-gated: ALiBi, whose slopes the keys decide, omega_h m_h softplus(u_h . k_j /
    sqrt(D)) per token of distance, with u_h of length 1, ALiBi's slopes m and omega, which starts at 1. Each layer has
    its own in theirs: grape_a:layer."""

    paper, formula = "Zhang et al. 2025 (GRAPE)", "-|j - i| omega_h m_h softplus(u_h . k_j / sqrt(D))"
    undecayed = "omega", "direction"
    numbered = False

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.omega = nn.Parameter(torch.full((dims.heads,), math.log(math.e - 1)))  # softplus of it is 1
        self.direction = nn.Parameter(torch.randn(dims.heads, dims.head_dim) * dims.head_dim**-0.5)

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor:
        x = k.float() * q.size(-1) ** -0.5
        gate = F.softplus(x @ F.normalize(self.direction.float(), dim=-1)[:, :, None])  # [B, H, L, 1]
        slope = F.softplus(self.omega.float()) * Alibi.slopes_of(len(self.omega), q.device)
        distance = (layer.positions.index - layer.positions.index[:, None]).abs()  # [L, L]
        return -(distance * slope[:, None, None] * gate.transpose(2, 3)) / layer.scale
