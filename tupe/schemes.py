"""Every position encoding, by family: absolute vectors, biases of the logits, relative vectors, rotations, gates.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, E width of a value head, N layers.
Position i = 0 is [CLS]; the offset of key j from query i is j - i. What a hook returns is documented in
`positions.PositionScheme`. Tables of schemes show `paper` and `formula`.

Options that several schemes have: std, the initial standard deviation of the table; max_distance, where offsets are
clipped; amplitude, of sinusoids; multiplier m: the scheme uses m times its table, whose initial values are 1 / m of the
usual ones. So the first forward pass is the same for every m, but an optimizer whose steps do not depend on the size of
the gradients (Adam) changes the term m times as fast.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import linear
from .positions import SCHEMES, Dims, PositionScheme, register, undecayed  # noqa: F401  (from here SCHEMES is complete)


def toeplitz(by_offset: Tensor, length: int) -> Tensor:
    """[..., 2L - 1] values for offsets -(L-1) .. L-1 -> [..., L, L] with entry (i, j) = value of offset j - i."""
    # contiguous: else the memory order of a table, [2L - 1, H], would make every later pass over one head strided
    return by_offset.contiguous().unfold(-1, length, 1).flip(-2)


def skew(x: Tensor) -> Tensor:
    """[..., L, 2L - 1], row i by offset -(L-1) .. L-1 -> [..., L, L] with entry (i, j) = x[i] at offset j - i."""
    length = x.size(-2)
    if length == 1:
        return x
    # flat index of entry (i, j): i (2L - 1) + j - i + L - 1 = i (2L - 2) + j + (L - 1)
    flat = x.flatten(-2)[..., length - 1 :][..., : length * (2 * length - 2)]
    return flat.unflatten(-1, (length, 2 * length - 2))[..., :length]


def unskew(x: Tensor) -> Tensor:
    """Inverse of `skew`: [..., L, L] -> [..., L, 2L - 1], 0 at offsets that do not occur in a row."""
    length = x.size(-2)
    if length == 1:
        return x
    flat = F.pad(F.pad(x, (0, length - 2)).flatten(-2), (length - 1, 1))
    return flat.unflatten(-1, (length, 2 * length - 1))


class Table(nn.Embedding):
    """An embedding table of positions or offsets with an initial standard deviation of its own."""

    def __init__(self, rows: int, width: int, std: float = 0.02):
        self.std = at_least(0, std=std)
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def at_least(smallest: int, **option: float) -> float:
    """The value of the one option given as `name=value`. Raises ValueError if it is less than `smallest`."""
    ((name, value),) = option.items()
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, not {value}")
    return value


def positive(**option: float) -> float:
    """The value of the one option given as `name=value`. Raises ValueError unless it is more than 0."""
    ((name, value),) = option.items()
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, not {value}")
    return value


def times(x: Tensor, multiplier: float) -> Tensor:
    """x * multiplier, without a copy for 1."""
    return x if multiplier == 1 else x * multiplier


@register("nopos")
class NoPosition(PositionScheme):
    """No position information at all; the encoder becomes permutation-equivariant."""

    paper, formula = "(control)", "nothing"


# Absolute encodings, added to the token embeddings.


@register("absolute")
class Absolute(PositionScheme):
    """Learned vectors p_i (BERT; the fully learnable APE of Wang et al., 2021).

    norm: apply a layer norm to p_i, as `untied` does; gain: its initial gain.
    """

    paper, formula = "Devlin et al. 2019", "w_i + p_i"

    def __init__(self, dims: Dims, std: float = 0.02, norm: bool = False, gain: float = 1.0):
        super().__init__(dims)
        if gain != 1 and not norm:
            raise ValueError("gain is the gain of the layer norm: it needs norm:True")
        self.table = Table(dims.max_positions, dims.width, std)
        self.norm = nn.LayerNorm(dims.width) if norm else None
        if norm:
            nn.init.constant_(self.norm.weight, gain)

    def embed(self, length: int) -> Tensor:
        rows = self.table.weight[:length]
        return rows if self.norm is None else layer_norm(rows, self.norm)


def layer_norm(rows: Tensor, norm: nn.LayerNorm) -> Tensor:
    """A layer norm in float32, whatever the precision of its parameters."""
    return F.layer_norm(rows.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)


def frequencies(width: int, device: torch.device | None = None, base: float = 10000.0) -> Tensor:
    """omega_i = base^(-2i/width), i = 0 .. width/2 - 1. Raises ValueError for an odd width."""
    if width % 2:
        raise ValueError(f"sinusoids and rotations need an even width, not {width}")
    return base ** (-torch.arange(0, width, 2, device=device).float() / width)


def waves(omega: Tensor, positions: Tensor) -> Tensor:
    """[P] positions -> [P, 2 len(omega)]: sines in the even columns, cosines in the odd ones, in float32."""
    angle = positions[:, None].float() * omega.float()  # [P, width / 2]
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class LearnedFrequencies(nn.Module):
    """Mixin of schemes that learn frequencies omega [width / 2], from `frequencies` on.

    The parameter is log omega, without weight decay: a step of Adam's, as large as the learning rate whatever the
    gradient, then changes every frequency by the same share. Steps of omega itself would be larger than the small
    frequencies are, and decay would lengthen all waves. Under --fp16 log omega is rounded to half precision, as all
    parameters are (omega by up to 0.4 %); --amp and --autocast bf16 keep it.
    """

    def start_frequencies(self, width: int) -> None:
        self.log_omega = undecayed(frequencies(width).log())
        # 1, but in checkpoints from before omega was a logarithm, where steps across 0 were possible
        self.register_buffer("sign", torch.ones(len(self.log_omega)))

    @property
    def omega(self) -> Tensor:
        return self.sign.float() * self.log_omega.float().exp()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if (omega := state_dict.pop(f"{prefix}omega", None)) is not None:  # such a checkpoint
            state_dict[f"{prefix}sign"] = torch.where(omega < 0, -1.0, 1.0)
            state_dict[f"{prefix}log_omega"] = omega.abs().log()
        super()._load_from_state_dict(state_dict, prefix, *args)


@register("sinusoidal")
class Sinusoidal(PositionScheme):
    """Fixed sinusoids (Vaswani et al., 2017), omega_i = 10000^(-2i/C), with the initial size of word vectors.

    Vaswani et al. multiply word vectors by sqrt(C), so that their entries are about 1. Here their initial standard
    deviation is 0.02, and sinusoids of amplitude 1 would drown them for thousands of updates.
    """

    paper, formula = "Vaswani et al. 2017", "w_i + 0.02 [sin, cos](omega i), omega fixed"

    def __init__(self, dims: Dims, amplitude: float = 0.02):
        super().__init__(dims)
        self.amplitude = amplitude
        self.width = len(frequencies(dims.width)) * 2
        # Integers only: `half()` would round a buffer of frequencies and change the sines of far positions.
        self.register_buffer("positions", torch.arange(dims.max_positions), persistent=False)

    def embed(self, length: int) -> Tensor:
        return self.amplitude * waves(frequencies(self.width, self.positions.device), self.positions[:length])


@register("sinusoidal_learned")
class SinusoidalLearned(LearnedFrequencies, PositionScheme):
    """Sinusoids whose C/2 frequencies are learned, initialised to the fixed ones (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "w_i + 0.02 [sin, cos](omega i), omega learned"

    def __init__(self, dims: Dims, amplitude: float = 0.02):
        super().__init__(dims)
        self.amplitude = amplitude
        self.start_frequencies(dims.width)

    def embed(self, length: int) -> Tensor:
        return self.amplitude * waves(self.omega, torch.arange(length, device=self.log_omega.device))


# Logits that do not depend on the tokens, shared by the whole batch.


@register("untied")
class Untied(PositionScheme):
    """TUPE (Ke et al., 2021), equations 7 and 10: (LN(p_i) U_Q) . (LN(p_j) U_K) * scale, shared by all layers.

    Row 0 of the table is p_theta1 (from [CLS]), row 1 is p_theta2 (to [CLS]), position i has row i + 1; so [CLS]'s own
    position, used only if [CLS] is tied, is row 1. U_Q and U_K have biases, as in the released code. norm: the layer
    norm on p_i, after which `std` does not matter.
    """

    paper, formula = "Ke et al. 2021 (TUPE)", "p_i U_Q . p_j U_K / sqrt(2D)"
    extra_terms = 1

    def __init__(self, dims: Dims, norm: bool = True, std: float = 0.02):
        super().__init__(dims)
        self.heads = dims.heads
        self.table = Table(dims.max_positions + 1, dims.width, std)
        self.norm = nn.LayerNorm(dims.width) if norm else None
        self.q = nn.Linear(dims.width, dims.heads * dims.head_dim)
        self.k = nn.Linear(dims.width, dims.heads * dims.head_dim)

    def project(self, start: int, end: int) -> list[Tensor]:
        """Queries and keys of table rows start..end in float32, [H, rows, D] each."""
        rows = self.table.weight[start:end].float()
        rows = rows if self.norm is None else layer_norm(rows, self.norm)
        return [per_head(rows, u, self.heads) for u in (self.q, self.k)]

    def bias(self, length: int, scale: float) -> Tensor:
        q, k = self.project(1, length + 1)
        return (q * scale) @ k.transpose(1, 2)

    def cls_bias(self, scale: float) -> Tensor:
        q, k = self.project(0, 2)
        return (q * k).sum(2).T * scale  # [2, H]


def per_head(rows: Tensor, module: nn.Linear, heads: int) -> Tensor:
    """[rows, C] through a Linear in float32, then split into heads: [H, rows, D]."""
    bias = module.bias.float() if module.bias is not None else None
    return linear(rows, module.weight.float(), bias).unflatten(1, (heads, -1)).transpose(0, 1)


@register("absolute_d")
class AbsoluteDisentangled(Untied):
    """BERT-A^d (TUPE, section 3.2): all four terms of words and positions; positions have projections of their own.

    x_i W_Q . x_j W_K + x_i W_Q . p_j U_K + p_i U_Q . x_j W_K + p_i U_Q . p_j U_K, all over sqrt(4D). It differs
    from `untied` in the two middle terms and the scale alone.
    """

    paper, formula = "Ke et al. 2021 (BERT-A^d)", "(q_i . p_j U_K + p_i U_Q . k_j + p_i U_Q . p_j U_K) / sqrt(4D)"
    extra_terms = 3

    def content(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        pos_q, pos_k = (p.to(q.dtype) for p in self.project(1, q.size(2) + 1))  # [H, L, D]
        return q @ pos_k.transpose(1, 2) + pos_q @ k.transpose(2, 3)


@register("t5")
class T5(PositionScheme):
    """T5 (Raffel et al., 2020) as TUPE-R uses it: a learned scalar per head and bucket of the offset, not scaled.

    Bidirectional: half of the buckets are for keys to the right. Distances from max_distance on share one bucket. The
    bucket of offset 0 counted as positive (16 of 32) never occurs, so its row is theta1 (from [CLS]); an extra last row
    is theta2 (to [CLS]).
    """

    paper, formula = "Raffel et al. 2020", "b[h, bucket(j - i)]"

    def __init__(self, dims: Dims, buckets: int = 32, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"buckets must be a multiple of 4, not {buckets}")
        if max_distance <= buckets // 4:
            raise ValueError(f"max_distance must be more than buckets / 4, not {max_distance} with {buckets} buckets")
        self.buckets, self.max_distance, self.multiplier = buckets, max_distance, positive(multiplier=multiplier)
        self.table = Table(buckets + 1, dims.heads, 0.02 / multiplier)
        offsets = torch.arange(1 - dims.max_positions, dims.max_positions)
        self.register_buffer("bucket", self.bucket_of(offsets), persistent=False)  # [2 L_max - 1]

    def bucket_of(self, offset: Tensor) -> Tensor:
        """Bucket of each offset: half of the buckets per sign; of those, half for exact distances, half spaced
        logarithmically."""
        half, exact = self.buckets // 2, self.buckets // 4
        distance = offset.abs()
        # float32, because bfloat16 would move the borders
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(distance < exact, distance, far) + half * (offset > 0)

    def bias(self, length: int, scale: float) -> Tensor:
        middle = self.bucket.size(0) // 2
        by_offset = self.table(self.bucket[middle - length + 1 : middle + length])  # [2L - 1, H]
        return toeplitz(times(by_offset.float().T, self.multiplier), length)

    def cls_bias(self, scale: float) -> Tensor:
        half = self.buckets // 2
        # rows `half` and `buckets`, as a slice: a list of indices would be copied to the GPU
        return times(self.table.weight[half::half].float(), self.multiplier)


class Clipped(PositionScheme):
    """Base of schemes with one table row per offset j - i, clipped to max_distance t: row t + clip(j - i, -t, t)."""

    def __init__(self, dims: Dims, max_distance: int):
        super().__init__(dims)
        self.max_distance = at_least(1, max_distance=max_distance)

    def index(self, length: int, device: torch.device) -> Tensor:
        """[2L - 1] rows for offsets -(L-1) .. L-1."""
        offsets = torch.arange(1 - length, length, device=device)
        return offsets.clamp(-self.max_distance, self.max_distance) + self.max_distance


@register("clipped")
class ClippedScalar(Clipped):
    """A learned scalar per head and clipped offset, t = 128: the simpler form of T5's buckets (TUPE, footnote on T5;
    Shaw et al., 2018)."""

    paper, formula = "Ke et al. 2021, footnote", "b[h, clip(j - i, 128)]"

    def __init__(self, dims: Dims, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims, max_distance)
        self.multiplier = positive(multiplier=multiplier)
        self.table = Table(2 * max_distance + 1, dims.heads, 0.02 / multiplier)

    def bias(self, length: int, scale: float) -> Tensor:
        by_offset = self.table(self.index(length, self.table.weight.device))  # [2L - 1, H]
        return toeplitz(times(by_offset.float().T, self.multiplier), length)


@register("nonparametric")
class NonParametric(PositionScheme):
    """A free H x L x L matrix of logits: the first failed attempt of TUPE's appendix D. Like T5's bias it is not scaled
    and does not count as a term beside q.k:

        nonparametric:          x_i W_Q . x_j W_K / sqrt(D) + b_ij
        untied+nonparametric:   (x_i W_Q . x_j W_K + p_i U_Q . p_j U_K) / sqrt(2D) + b_ij
    """

    paper, formula = "Ke et al. 2021, app. D", "b[h, i, j]"

    def __init__(self, dims: Dims, multiplier: float = 1.0):
        super().__init__(dims)
        self.multiplier, shape = positive(multiplier=multiplier), (dims.heads, dims.max_positions, dims.max_positions)
        self.table = nn.Parameter(torch.randn(shape) * (0.02 / multiplier))

    def bias(self, length: int, scale: float) -> Tensor:
        return times(self.table[:, :length, :length].float(), self.multiplier)


@register("factored")
class Factored(Clipped):
    """A relative bias from vectors r of clipped offsets: the second failed attempt of TUPE's appendix D.

    It stands where T5's bias does, so it does not count as a term beside q.k. The appendix gives no scale; it has that
    of the others. Without biases in F_Q and F_K.

        factored:          (x_i W_Q . x_j W_K + r_{j-i} F_Q . r_{j-i} F_K) / sqrt(D)
        untied+factored:   (x_i W_Q . x_j W_K + p_i U_Q . p_j U_K + r_{j-i} F_Q . r_{j-i} F_K) / sqrt(2D)
    """

    paper, formula = "Ke et al. 2021, app. D", "r_{j-i} F_Q . r_{j-i} F_K / sqrt(D), sqrt(2D) beside untied"

    def __init__(self, dims: Dims, max_distance: int = 128, std: float = 0.02):
        super().__init__(dims, max_distance)
        self.heads = dims.heads
        self.table = Table(2 * max_distance + 1, dims.width, std)
        self.q = nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False)
        self.k = nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False)

    def bias(self, length: int, scale: float) -> Tensor:
        rows = self.table(self.index(length, self.table.weight.device)).float()  # [2L - 1, C]
        q, k = per_head(rows, self.q, self.heads), per_head(rows, self.k, self.heads)  # [H, 2L - 1, D]
        return toeplitz((q * k).sum(2) * scale, length)


@register("alibi")
class Alibi(PositionScheme):
    """ALiBi (Press et al., 2022), symmetric for encoders: a fixed slope per head times the distance. No parameters."""

    paper, formula = "Press et al. 2022", "-m_h |j - i|"

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.heads, self.max_positions = dims.heads, dims.max_positions
        distance = torch.arange(1 - dims.max_positions, dims.max_positions).abs()
        self.register_buffer("distance", distance, persistent=False)  # integers: `half()` would round others

    @staticmethod
    def slopes_of(heads: int, device: torch.device | None = None) -> Tensor:
        """2^(-8h/H) for h = 1 .. H if H is a power of two; else the slopes of the next lower power, then every other
        slope of the next higher one."""
        power = 2 ** int(math.log2(heads))
        low = 2.0 ** (-8 * torch.arange(1, power + 1, device=device) / power)
        high = 2.0 ** (-8 * torch.arange(1, 2 * power + 1, 2, device=device) / (2 * power))
        return torch.cat([low, high])[:heads]

    def bias(self, length: int, scale: float) -> Tensor:
        distance = self.distance[self.max_positions - length :][: 2 * length - 1]
        return toeplitz(-self.slopes_of(self.heads, distance.device)[:, None] * distance, length)


# Logits that depend on content: relative vectors against queries and keys.


class RelativeVectors(Clipped):
    """Base of Shaw et al. (2018): a vector r per clipped offset, shared by all heads. Offsets are clipped at 64 (our
    choice)."""

    def vectors(self, length: int) -> Tensor:
        """[2L - 1, D] for offsets -(L-1) .. L-1."""
        raise NotImplementedError

    def content(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        return skew(q @ self.vectors(q.size(2)).to(q.dtype).T)  # [B, H, L, 2L - 1] -> [B, H, L, L]


@register("shaw")
class Shaw(RelativeVectors):
    """Relative vectors added to the keys (Shaw et al., 2018; the fully learnable RPE of Wang et al., 2021)."""

    paper, formula = "Shaw et al. 2018", "q_i . r_{clip(j - i)} / sqrt(D)"

    def __init__(self, dims: Dims, max_distance: int = 64, std: float = 0.02):
        super().__init__(dims, max_distance)
        self.table = Table(2 * max_distance + 1, dims.head_dim, std)

    def vectors(self, length: int) -> Tensor:
        return self.table(self.index(length, self.table.weight.device))


@register("shaw_sinusoidal")
class ShawSinusoidal(RelativeVectors):
    """Relative vectors that are fixed sinusoids of the clipped offset (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "q_i . [sin, cos](omega clip(j - i)) / sqrt(D), omega fixed"

    def __init__(self, dims: Dims, max_distance: int = 64, amplitude: float = 1.0):
        super().__init__(dims, max_distance)
        self.amplitude = amplitude
        self.width = len(frequencies(dims.head_dim)) * 2
        offsets = torch.arange(-self.max_distance, self.max_distance + 1)
        self.register_buffer("offsets", offsets, persistent=False)  # integers: `half()` would round others

    def vectors(self, length: int) -> Tensor:
        rows = waves(frequencies(self.width, self.offsets.device), self.offsets)
        return times(rows[self.index(length, self.offsets.device)], self.amplitude)


@register("shaw_sinusoidal_learned")
class ShawSinusoidalLearned(LearnedFrequencies, RelativeVectors):
    """Relative vectors that are sinusoids of the clipped offset with learned frequencies (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "q_i . [sin, cos](omega clip(j - i)) / sqrt(D), omega learned"

    def __init__(self, dims: Dims, max_distance: int = 64, amplitude: float = 1.0):
        super().__init__(dims, max_distance)
        self.amplitude = amplitude
        self.start_frequencies(dims.head_dim)

    def vectors(self, length: int) -> Tensor:
        offsets = self.index(length, self.log_omega.device) - self.max_distance
        return times(waves(self.omega, offsets), self.amplitude)


@register("shaw_values")
class ShawValues(Clipped):
    """Shaw et al.'s second half: relative vectors added to the values, sum_j weights_ij r_{j-i}. Combine:
    shaw+shaw_values."""

    paper, formula = "Shaw et al. 2018", "o_i + sum_j a_ij r_{clip(j - i)}"

    def __init__(self, dims: Dims, max_distance: int = 64, std: float = 0.02):
        super().__init__(dims, max_distance)
        self.table = Table(2 * max_distance + 1, dims.value_dim, std)

    def value(self, weights: Tensor, layer: int) -> Tensor:
        rows = self.table(self.index(weights.size(-1), weights.device)).to(weights.dtype)  # [2L - 1, E]
        return unskew(weights) @ rows


@register("deberta")
class Deberta(PositionScheme):
    """DeBERTa's disentangled attention (He et al., 2021): content-to-position and position-to-content terms.

    q_i . P[delta(i, j)] V_K + k_j . P[delta(j, i)] V_Q with delta(i, j) = clip(i - j + t, 0, 2t - 1), where t is
    max_distance. The table P is shared by all layers, the projections are each layer's own, without biases.
    """

    paper, formula = "He et al. 2021", "(q_i . P_{i-j} V_K + k_j . P_{j-i} V_Q) / sqrt(3D)"
    extra_terms, own_projections = 2, True

    def __init__(self, dims: Dims, max_distance: int = 512, std: float = 0.02):
        super().__init__(dims)
        self.heads, layers = dims.heads, dims.layers if self.own_projections else 1
        self.max_distance = at_least(1, max_distance=max_distance)
        self.table = Table(2 * max_distance, dims.width, std)
        self.q = nn.ModuleList(nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False) for _ in range(layers))
        self.k = nn.ModuleList(nn.Linear(dims.width, dims.heads * dims.head_dim, bias=False) for _ in range(layers))

    def content(self, q: Tensor, k: Tensor, layer: int) -> Tensor:
        length, layer = q.size(2), layer if self.own_projections else 0
        # delta(i, j) falls with the offset j - i: rows for offsets -(L-1) .. L-1 are those of i - j = L-1 .. -(L-1)
        delta = torch.arange(length - 1, -length, -1, device=q.device) + self.max_distance
        rows = self.table(delta.clamp(0, 2 * self.max_distance - 1))  # [2L - 1, C]
        pos_q = per_head(rows.float(), self.q[layer], self.heads).to(q.dtype)  # [H, 2L - 1, D]
        pos_k = per_head(rows.float(), self.k[layer], self.heads).to(q.dtype)
        to_position = skew(q @ pos_k.transpose(1, 2))  # [B, H, L, L], entry (i, j)
        from_position = skew(k @ pos_q.transpose(1, 2))  # entry (j, i)
        return to_position + from_position.transpose(2, 3)


@register("deberta_shared")
class DebertaShared(Deberta):
    """`deberta` with one pair of projections for all layers, as TUPE shares its own."""

    paper, formula = "He et al. 2021, shared", "as deberta, V_Q and V_K shared by all layers"
    own_projections = False


# Rotations and gates, which change neither the embeddings nor the logits.


@register("rope")
class Rope(PositionScheme):
    """RoPE (Su et al., 2021): q and k rotated by their position, so that their product depends on the offset. No
    parameters."""

    paper, formula = "Su et al. 2021", "(R_i q_i) . (R_j k_j) / sqrt(D)"

    def __init__(self, dims: Dims, base: float = 10000.0):
        super().__init__(dims)
        if not base > 1:
            raise ValueError(f"base must be more than 1, not {base}")
        self.base = base

    def rotate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rotated(q, self.base), rotated(k, self.base), v


@register("rope_values")
class RopeValues(Rope):
    """RoPE on the values too: o_i = R_i^-1 sum_j a_ij R_j v_j, so that the output depends on offsets too (Su, 2022)."""

    paper, formula = "Su 2022", "rope, and o_i = sum_j a_ij R_{j-i} v_j"

    def rotate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(rotated(x, self.base) for x in (q, k, v))

    def unrotate(self, out: Tensor) -> Tensor:
        return rotated(out, self.base, -1)


def rotated(x: Tensor, base: float, sign: int = 1) -> Tensor:
    """x [..., L, D] with columns (2m, 2m + 1) rotated by the angle sign * i * base^(-2m/D) at position i."""
    omega = frequencies(x.size(-1), x.device, base)
    angle = sign * torch.arange(x.size(-2), device=x.device)[:, None] * omega  # [L, D / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


@register("urpe")
class Urpe(Clipped):
    """URPE (Luo et al., 2022): weights multiplied by a learned Toeplitz matrix, c_ij = g[h, clip(j - i)], initialised
    to 1."""

    paper, formula = "Luo et al. 2022", "a_ij g[h, clip(j - i, 128)]"

    def __init__(self, dims: Dims, max_distance: int = 128, multiplier: float = 1.0):
        super().__init__(dims, max_distance)
        self.multiplier = positive(multiplier=multiplier)
        self.table = nn.Parameter(torch.ones(dims.heads, 2 * max_distance + 1) / multiplier)

    def gate(self, length: int) -> Tensor:
        by_offset = self.table[:, self.index(length, self.table.device)]  # [H, 2L - 1]
        return toeplitz(times(by_offset.float(), self.multiplier), length)
