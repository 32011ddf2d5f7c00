"""Folders of transformers wherever a checkpoint's file is read: what `tupe pretrain --engine transformers` and
`tupe checkpoint export` write, and what `save_pretrained` makes of them."""

import hashlib
from pathlib import Path

from ..common import record
from ..common.safe_load import num_updates, read_checkpoint, read_config

CONVERTED = "as_fairseq.pt"
SOURCES = ("config.json", "dict.txt", record.NAME, "model.safetensors", "pytorch_model.bin")


def as_file(checkpoint: str | Path) -> Path:
    """The file of a checkpoint: of a folder, the same model as fairseq reads it, which is written into the folder when
    it is first asked for, and anew for other contents or in another place. Raises ValueError for a folder without such
    a model."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return folder
    config_of(folder)
    from .convert import from_export, read_hugging_face  # only here: they import fairseq
    from .files import save_atomically

    file, place, digest = folder / CONVERTED, str(folder.resolve()), hashlib.sha256()
    for source in (folder / name for name in SOURCES):
        digest.update(f"{source.name} ".encode() + (source.read_bytes() if source.is_file() else b""))
    made_from = {"contents": digest.hexdigest(), "place": place}  # a copy or a move keeps no order of times
    if _made_from(file) != made_from:
        state = from_export(*read_hugging_face(folder), folder / "dict.txt")
        state["cfg"]["task"]["data"] = place  # where dict.txt and the pieces are
        state["optimizer_history"][-1]["num_updates"] = record.updates_of(folder)
        state["extra_state"]["made_from"] = made_from
        save_atomically(state, file)
    return file


def _made_from(file):
    try:
        return read_checkpoint(file, mmap=True)["extra_state"].get("made_from")
    except ValueError:  # not there, or cut off by whatever copied it
        return None


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
    return num_updates(read_checkpoint(checkpoint, mmap=True))
