"""TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin (`--user-dir tupe`)."""

import importlib
import sys

__version__ = "0.2.0"


class _PathThatLoadsThePlugin(list[str]):
    """`tupe.__path__` of a process that imported `tupe` before fairseq.

    `--user-dir tupe` then finds the package imported, and fairseq asks no more than `folder in tupe.__path__`: the only
    moment at which the plugin can still be loaded.
    """

    def __contains__(self, folder: object) -> bool:
        if sys.modules.get("fairseq"):
            importlib.import_module("tupe.plugin")
        return super().__contains__(folder)


if sys.modules.get("fairseq"):  # fairseq is loading its `--user-dir`; without it, the core needs only torch
    from . import plugin  # noqa: F401
else:
    __path__ = _PathThatLoadsThePlugin(__path__)
