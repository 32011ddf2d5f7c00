"""What evaluations begin with: the models that a user names, as `[LABEL=]CHECKPOINT`, and held-out text."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from ..checkpoints.folders import config_of
from ..common.options import quiet_imports
from ..data.splits import Split, folders_of
from .model import HeldOut, Model


def load_model(checkpoint: str | Path, data: str | Path | None = None) -> tuple:
    """(model in evaluation mode, task) of a checkpoint: of a file those of fairseq, of a folder that transformers reads
    a `Model` and a `HeldOut`, without fairseq. data: folder with dict.txt, default: where a file was trained, or the
    folder itself.

    The model computes in float32, also where it was trained in bfloat16 autocast: differences between two sentences are
    often smaller than the rounding of bfloat16.
    Raises ValueError if the checkpoint cannot be read, or the dictionary is not there.
    """
    if Path(checkpoint).is_dir():
        config_of(checkpoint)
        folder = folders_of(data or checkpoint)[0].resolve()
        model = Model.load(checkpoint, folder)
        return model, HeldOut(checkpoint, folder, model.max_positions())
    with quiet_imports():
        from fairseq import checkpoint_utils

        from ..plugin.gate import read_checkpoint
        from ..plugin.masked_lm import TupeMaskedLMTask

    trained = read_checkpoint(checkpoint, mmap=True)  # its errors name what is wrong; fairseq reads it then
    changes = {"autocast": "none"} if data is None else {"autocast": "none", "data": str(data)}
    try:
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=changes)
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint}: {error}; give the folder of its dict.txt with --data") from error
    except RuntimeError as error:  # weights of other sizes than the configuration says
        raise ValueError(f"{checkpoint} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    if isinstance(task, TupeMaskedLMTask) and "long_sentences" not in trained["cfg"]["task"]:
        task.cfg.long_sentences = "skip"  # before version 0.3: the blocks, masks and losses that it had
    return models[0].float().eval(), task


def split_label(source: str) -> tuple[str, str]:
    """("", PATH) or (LABEL, PATH) of "PATH" or "LABEL=PATH", either of which may have more "=": what exists decides,
    and the shortest label. Raises ValueError if nothing of it exists."""
    ends = [0, *(match.end() for match in re.finditer("(?<!^)=", source))]
    for end in ends:
        if source[end:] and Path(source[end:]).exists():
            return source[:end].removesuffix("="), source[end:]
    raise ValueError(f"{source} not found; valid: an existing file or folder, as PATH or LABEL=PATH")


def labelled(sources: Iterable) -> dict:
    """{label: path} of "LABEL=PATH" or "PATH", which is its own label then. ValueError for a repeated label, and for
    one that figures would leave out."""
    paths = {}
    for source in sources:
        label, path = split_label(source)
        label = label or source
        if label.startswith("_"):
            raise ValueError(f"{label}: figures leave out what begins with _; give another label: LABEL={path}")
        if label in paths:
            raise ValueError(f"{label} stands for both {paths[label]} and {path}; give each its own label")
        paths[label] = path
    return paths


def file_names(labels: Iterable[str]) -> dict[str, str]:
    """{label: its name in the output folder}, without "/". ValueError for two labels of one name."""
    owners = {}
    for label in labels:
        name = label.replace("/", "_")
        if name in owners:
            raise ValueError(f"{owners[name]} and {label} would both be kept as {name}; give one another label")
        owners[name] = label
    return {label: name for name, label in owners.items()}


def text_block(task: HeldOut, length: int, split: str = "valid") -> torch.Tensor:
    """[L] ids: `<s>` and the first tokens of a split, at most `length` in all."""
    tokens = Split(folders_of(task.cfg.data)[0] / split).tokens[: length - 1]
    return torch.tensor([task.source_dictionary.bos(), *tokens.tolist()])
