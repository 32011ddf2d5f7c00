"""The door to every position encoding: importing it completes the registry SCHEMES.

What is imported here by name is for encodings of users' own files and for tests.
"""

from .offsets import skew, toeplitz, unskew  # noqa: F401
from .positions import SCHEMES  # noqa: F401
from .schemes_absolute import Absolute  # noqa: F401  (each family registers its schemes)
from .schemes_bias import T5  # noqa: F401
from .schemes_common import Table, frequencies  # noqa: F401
from .schemes_content import Shaw  # noqa: F401
from .schemes_rotation import Rope  # noqa: F401
