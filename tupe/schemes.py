"""The door to every position encoding: the registry, and what encodings in users' own files build on."""

from .positions import SCHEMES
from .schemes_absolute import Absolute
from .schemes_bias import T5
from .schemes_common import Table, frequencies
from .schemes_content import Shaw
from .schemes_rotation import Rope
from .token_positions import skew, toeplitz, unskew

__all__ = ["SCHEMES", "T5", "Absolute", "Rope", "Shaw", "Table", "frequencies", "skew", "toeplitz", "unskew"]
