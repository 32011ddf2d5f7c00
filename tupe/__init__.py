"""TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin (`--user-dir tupe`)."""

import sys

__version__ = "0.3.0"

# fairseq is loading its `--user-dir`. A script that imports `tupe` before fairseq imports `tupe.plugin` itself.
if sys.modules.get("fairseq"):
    from . import plugin  # noqa: F401
