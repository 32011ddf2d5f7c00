"""The door to every position encoding: the registry, and what encodings in users' own files build on."""

from .positions import SCHEMES  # noqa: F401
from .schemes_absolute import Absolute  # noqa: F401
from .schemes_bias import T5  # noqa: F401
from .schemes_common import Table, frequencies  # noqa: F401
from .schemes_content import Shaw  # noqa: F401
from .schemes_rotation import Rope  # noqa: F401
from .token_positions import skew, toeplitz, unskew  # noqa: F401
