"""Folders of data prepared for fine-tuning, and the one text encoder of all their tasks."""

import json
import logging
import os
from pathlib import Path

from ..run.checksums import check, seal
from ..run.folder import write_atomically
from ..text import TextEncoder

logger = logging.getLogger(__name__)


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


def copied_encoder(vocabulary: Path, output: Path) -> TextEncoder:
    """The text encoder of the folder `vocabulary`, when its files are in the folder `output`, too. Raises ValueError if
    what is there was prepared with another one."""
    encoder = text_encoder(vocabulary)
    files = {name: path.read_bytes() for name, path in encoder_files(vocabulary).items()}
    output.mkdir(exist_ok=True)
    for name in TextEncoder.FILES:
        if (output / name).exists() and (output / name).read_bytes() != files.get(name):
            raise ValueError(
                f"{output} was prepared with another vocabulary ({name} differs from that of {vocabulary}): "
                "choose another output folder, or remove it"
            )
    for name, content in files.items():
        write_atomically(output / name, content)
    seal(output, files)
    return encoder


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
        logger.warning(
            f"{data} has no tokeniser's file: the model is saved without one; `tupe prepare corpus` makes both"
        )
        return files
    return {**files, "tokenizer_config.json": json.dumps(settings, indent=2, allow_nan=False) + "\n"}
