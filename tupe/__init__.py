"""TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin (`--user-dir tupe`)."""

from . import model  # noqa: F401

__version__ = "0.1.0"
