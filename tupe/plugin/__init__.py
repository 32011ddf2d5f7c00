"""What fairseq sees: importing this package registers models, tasks, criterions, optimizer and schedule."""

from . import compat  # noqa: F401  isort: skip  (before anything that loads a checkpoint or starts Hydra)
from . import criterion, electra, glue, masked_lm, optim, resume, schedule, squad  # noqa: F401
from .model import TupeModel

__all__ = ["TupeModel"]
