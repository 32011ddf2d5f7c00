"""Absolute encodings, added to the token embeddings; and none at all.

The letters are those of `positions.py`, whose `PositionScheme` documents the hooks. Tables of schemes show `paper` and
`formula`.
"""

from torch import Tensor, nn

from .positions import Dims, PositionScheme, register
from .schemes_common import LayerNorm, LearnedFrequencies, Table, frequencies, waves
from .token_positions import TokenPositions


@register("nopos")
class NoPosition(PositionScheme):
    """No position information at all; the encoder becomes permutation-equivariant."""

    paper, formula = "(control)", "nothing"


@register("absolute")
class Absolute(PositionScheme):
    """Learned vectors p_i (BERT; the fully learnable APE of Wang et al., 2021).

    norm: apply a layer norm to p_i, as `untied` does; gain: its initial gain.
    """

    paper, formula = "Devlin et al. 2019", "w_i + p_i"
    bounded, first_word_row = True, 1

    def __init__(self, dims: Dims, std: float = 0.02, norm: bool = False, gain: float = 1.0):
        super().__init__(dims)
        if gain != 1 and not norm:
            raise ValueError("gain is the gain of the layer norm: it needs norm:True")
        self.table = Table(dims.max_positions, dims.width, std)
        self.norm = LayerNorm(dims.width) if norm else None
        if self.norm is not None:
            nn.init.constant_(self.norm.weight, gain)

    def embed(self, positions: TokenPositions) -> Tensor:
        rows = self.table(slice(positions.length) if positions.drawn is None else positions.drawn)
        return rows if self.norm is None else self.norm(rows)


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

    def embed(self, positions: TokenPositions) -> Tensor:
        return self.amplitude * waves(frequencies(self.width, positions.device), positions.index)


@register("sinusoidal_learned")
class SinusoidalLearned(LearnedFrequencies, PositionScheme):
    """Sinusoids whose C/2 frequencies are learned, initialised to the fixed ones (Wang et al., 2021)."""

    paper, formula = "Wang et al. 2021", "w_i + 0.02 [sin, cos](omega i), omega learned"

    def __init__(self, dims: Dims, amplitude: float = 0.02):
        super().__init__(dims)
        self.amplitude = amplitude
        self.start_frequencies(dims.width)

    def embed(self, positions: TokenPositions) -> Tensor:
        return self.amplitude * waves(self.omega, positions.index)
