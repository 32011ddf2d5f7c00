"""TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin (`--user-dir tupe`)."""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:  # fairseq is loading its `--user-dir`; without it, the core needs torch alone
    from . import plugin  # noqa: F401
