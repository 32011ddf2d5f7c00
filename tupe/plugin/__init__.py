"""What fairseq sees: importing this package registers models, tasks, criterions, optimizer and schedule."""

import sys

from . import compat  # noqa: F401  isort: skip  (before anything that loads a checkpoint or starts Hydra)
from . import classification, electra, masked_lm, optim, patches, schedule  # noqa: F401
from .model import TupeModel

patches.apply(patches.ON_IMPORT)
if "fairseq_cli.train" in sys.modules:
    patches.apply(patches.IN_TRAINING)

__all__ = ["TupeModel"]
