"""Folders of transformers wherever a checkpoint's file is read: what `tupe pretrain --engine transformers` and
`tupe checkpoint export` write, and what `save_pretrained` makes of them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..common import record
from ..common.options import quiet_imports
from ..common.safe_load import num_updates, read_config


def contents_of(checkpoint: str | Path, mmap: bool = False) -> dict:
    """The contents of a checkpoint: of a file, or of a folder what fairseq would have written of the same model. Raises
    ValueError for a folder without such a model, and as `gate.read_checkpoint` does."""
    with quiet_imports():  # only here: they import fairseq
        from ..plugin.gate import read_checkpoint
        from .convert import from_export, read_hugging_face
    folder = Path(checkpoint)
    if not folder.is_dir():
        return read_checkpoint(folder, mmap)
    config_of(folder)
    state = from_export(*read_hugging_face(folder), folder / "dict.txt")
    state["cfg"]["task"]["data"] = str(folder.resolve())  # where dict.txt and the pieces are
    state["optimizer_history"][-1]["num_updates"] = record.updates_of(folder)
    return state


@contextmanager
def as_file(checkpoint: str | Path) -> Iterator[Path]:
    """The file of a checkpoint, for fairseq to train from: of a folder a temporary one, made anew each time, for a file
    that lies in a folder may be anybody's."""
    if not Path(checkpoint).is_dir():
        yield Path(checkpoint)
        return
    state = contents_of(checkpoint)
    state["extra_state"]["made_from"] = str(Path(checkpoint).resolve())  # what the run's record is to call it
    from .files import save_atomically  # only here: it imports fairseq

    with tempfile.TemporaryDirectory(prefix="tupe-") as folder:
        file = Path(folder) / "checkpoint.pt"
        save_atomically(state, file)
        yield file


def config_of(folder: str | Path) -> dict:
    """config.json of a folder with such a model. Raises ValueError for another folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face checkpoint")
    config = read_config(path)
    if (kind := config.get("model_type")) != "tupe":
        raise ValueError(f"{folder}: model_type is {kind!r}, not 'tupe'; `tupe checkpoint convert` reads 'bert' too")
    return config


def updates_of(checkpoint: str | Path) -> int:
    """After how many updates a checkpoint, file or folder, was written."""
    if Path(checkpoint).is_dir():
        config_of(checkpoint)
        return record.updates_of(checkpoint)
    return num_updates(contents_of(checkpoint, mmap=True))
