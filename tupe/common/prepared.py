"""Folders of data prepared for fine-tuning, and the one text encoder of all their tasks."""

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from ..run import processes
from ..run.checksums import check, seal
from ..run.folder import owned, write_atomically
from ..text import TextEncoder

logger = logging.getLogger(__name__)
worker = SimpleNamespace(encoder=None)  # the text encoder of this process


def tasks_in(folder: str | Path) -> list[str]:
    """Names of the tasks that are prepared in a folder, sorted: "CoLA", "RTE"."""
    manifests = Path(folder).glob("[!.]*/manifest.json")
    return sorted(path.parent.name for path in manifests if (path.parent / "input0").is_dir())


def check_name(folder: str | Path) -> None:
    """Raise ValueError for a folder of data whose path fairseq would not take as one."""
    path = os.path.abspath(folder)
    for sign, meaning in ((":", "what separates several folders"), ("${", "the name of another setting")):
        if sign in path:
            raise ValueError(f"{path}: in a path of data, fairseq takes {sign!r} as {meaning}; choose another name")


def check_replaced(folder: Path, name: str, overwrite: bool) -> None:
    """Raise ValueError if something is where a task is to be written: a task, without `overwrite`, or anything else."""
    if not (folder / name).exists():
        return
    if name not in tasks_in(folder):
        raise ValueError(f"{folder / name} is not a prepared task: choose another output folder")
    if not overwrite:
        raise ValueError(f"{folder / name} exists already; pass --overwrite to replace it")


@contextmanager
def encoding(vocabulary: str | Path, output: str | Path, workers: int | None) -> Iterator[Callable]:
    """Inside, `output` is this process's own and has the files of the text encoder of the folder `vocabulary`, and the
    value is a `map` for functions that use `worker.encoder`, in several processes (workers=None: one per core).

    Raises ValueError if something with another vocabulary is there, and if a worker dies; BlockingIOError if another
    process prepares data in `output`.
    """
    vocabulary, output = Path(vocabulary), Path(output)
    _start(vocabulary)  # also checks the folder
    with owned(output):
        output.mkdir(exist_ok=True)
        try:
            _copy_encoder(vocabulary, output)
            if workers == 1:
                yield map
            else:
                with processes.workers(workers or len(os.sched_getaffinity(0)), _start, vocabulary) as pool:
                    yield functools.partial(pool.map, chunksize=256)
        except BrokenExecutor as error:
            raise ValueError(
                "a process that encodes text died (killed, or out of memory?); use fewer --jobs if memory ran out"
            ) from error


def _start(vocabulary):
    worker.encoder = text_encoder(vocabulary)


def text_encoder(folder: str | Path) -> TextEncoder:
    """The text encoder of a folder. Raises ValueError for a file that is not what was written."""
    encoder_files(folder)
    return TextEncoder(folder)


def encoder_files(folder: str | Path) -> dict[str, Path]:
    """{name: path} of the files of a folder's text encoder. Raises ValueError for one that is not what was written."""
    files = {name: Path(folder, name) for name in TextEncoder.FILES if Path(folder, name).is_file()}
    for path in files.values():
        check(path)
    return files


def _copy_encoder(vocabulary, output):
    """Copy the encoder's files, unless what is there was prepared with others."""
    files = {name: path.read_bytes() for name, path in encoder_files(vocabulary).items()}
    for name in TextEncoder.FILES:
        if (output / name).exists() and (output / name).read_bytes() != files.get(name):
            raise ValueError(
                f"{output} was prepared with another vocabulary ({name} differs from that of {vocabulary}): "
                "choose another output folder, or remove it"
            )
    for name, content in files.items():
        write_atomically(output / name, content)
    seal(output, files)


def tokenizer_files(data: Path, max_positions: int, code: bool = True) -> dict[str, str | bytes]:
    """The text encoder's files and, if there are pieces, tokenizer_config.json: {name: content}."""
    files: dict[str, str | bytes] = {name: path.read_bytes() for name, path in encoder_files(data).items()}
    if "manifest.json" in files:  # it lists every input of the data; the text encoder reads only these
        manifest, names = json.loads(files["manifest.json"]), ("pipeline", *TextEncoder.SETTINGS)
        read = {name: manifest[name] for name in names if name in manifest}
        files["manifest.json"] = json.dumps(read, allow_nan=False) + "\n"
    settings = {"model_max_length": max_positions, "clean_up_tokenization_spaces": False}
    if "tokenizer.json" in files:  # it needs none of our code
        content = json.loads(files["tokenizer.json"])
        types = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
        special = {"cls_token": 0, "pad_token": 1, "sep_token": 2, "unk_token": 3, "mask_token": max(types)}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["model_input_names"] = ["input_ids", "attention_mask"]
        settings |= {name: types[index] for name, index in special.items()}
        if "add_prefix_space" in (content["pre_tokenizer"] or {}):  # transformers 4 takes False, if it is not here too
            settings["add_prefix_space"] = content["pre_tokenizer"]["add_prefix_space"]
    elif "sentencepiece.bpe.model" in files:
        settings["tokenizer_class"] = "TupeTokenizer"
        settings |= {"auto_map": {"AutoTokenizer": [None, "tokenization_tupe.TupeTokenizer"]}} if code else {}
    else:
        logger.warning(f"{data} has no tokeniser's file: exporting without a tokeniser")
        return files
    return {**files, "tokenizer_config.json": json.dumps(settings, indent=2, allow_nan=False) + "\n"}
