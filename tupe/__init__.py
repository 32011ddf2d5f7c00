"""TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin (`--user-dir tupe`)."""

from . import compat  # noqa: F401  isort: skip  (before anything that loads a checkpoint or starts Hydra)
from . import continued, criterion, electra, glue, model, optim, squad, training  # noqa: F401

__version__ = "0.1.0"
