"""What evaluations begin with: the models that a user names, as `[LABEL=]CHECKPOINT`, and held-out text.

B batch, L sequence length, V vocabulary.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoints.trained import check_dictionary, read_model
from ..data.blocks import BOS, Blocks
from ..data.masks import MaskedBlocks
from ..data.splits import HELD_OUT_SEED, Split, folders_of
from ..text import MASK

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

MASKING = {"tokens_per_sample": 512, "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1}


@dataclass
class HeldOut:
    """Prepared text in blocks with the masks of pre-training, as far as a checkpoint says what those were. masking:
    its values of `MASKING`."""

    data: Path
    symbols: list[str]  # of dict.txt
    masking: dict

    def blocks(self, split: str) -> MaskedBlocks:
        """Item (0, i) is block i with masks that are the same for all models."""
        length, masks = self.masking["tokens_per_sample"], {k: v for k, v in self.masking.items() if k.endswith("prob")}
        return MaskedBlocks(Blocks(self.data / split, length, self.symbols), self.symbols, HELD_OUT_SEED, **masks)


def load_model(checkpoint: str | Path, data: str | Path | None = None) -> tuple["TupeForMaskedLM", HeldOut]:
    """(`TupeForMaskedLM` in evaluation mode, its text) of a checkpoint, file or folder. data: folder with dict.txt,
    default: where it was trained, or the folder itself.

    The model computes in float32, also where it was trained in bfloat16 autocast: differences between two sentences are
    often smaller than the rounding of bfloat16.
    Raises ValueError if the checkpoint cannot be read, or the dictionary is not there.
    """
    trained = read_model(checkpoint, mmap=True)
    folder = folders_of(str(data or trained.task["data"]))[0]
    if not (folder / "dict.txt").is_file():
        raise ValueError(f"{checkpoint}: {folder} has no dict.txt; give the folder of its dict.txt with --data")
    symbols = check_dictionary(trained.weights, folder / "dict.txt")
    model = trained.model()
    if "lm_head.bias" not in trained.weights:
        model.lm_head = None
    model.config.name_or_path, model.config.mask_token_id = str(checkpoint), symbols.index(MASK)
    masking = {name: trained.task.get(name, value) for name, value in MASKING.items()}
    masking["tokens_per_sample"] = min(masking["tokens_per_sample"], trained.config.max_positions)
    return model, HeldOut(folder, symbols, masking)


def logits_at(
    model: "TupeForMaskedLM", ids: Tensor, where: tuple[Tensor, Tensor], num_tokens: int | None = None
) -> Tensor:
    """[n, V]: a model's logits at rows and columns [n] of ids [B, L]. num_tokens: see `Encoder.packing`."""
    if model.lm_head is None:
        name = model.config.name_or_path
        raise ValueError(f"{name} has no head of a masked language model: it predicts no words")
    encoder = model.tupe.encoder
    x, _ = encoder(ids, False, num_tokens, where[0] * ids.size(1) + where[1])
    return model.lm_head(x, encoder.tokens.weight).float()


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


def text_block(text: HeldOut, length: int, split: str = "valid") -> Tensor:
    """[L] ids: `<s>` and the first tokens of a split, at most `length` in all."""
    return torch.tensor([BOS, *Split(text.data / split).tokens[: length - 1].tolist()])
