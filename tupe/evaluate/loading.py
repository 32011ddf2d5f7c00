"""What evaluations share: the models that a user names, held-out text, the loss of masked tokens, and the files of the
results.

B batch, L sequence length, V vocabulary.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints.trained import MASKING, check_dictionary, read_model
from ..common import options
from ..data.blocks import BOS, EOS, Blocks
from ..data.masks import MaskedBlocks
from ..data.splits import HELD_OUT_SEED, Split, folders_of
from ..run.checksums import seal
from ..run.folder import write_atomically
from ..run.record import command_line
from ..text import MASK

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM as Model
else:
    Model = Any


@dataclass
class HeldOut:
    """Prepared text in blocks with the masks of pre-training, as far as a checkpoint says what those were. masking:
    its values of `MASKING`."""

    data: Path
    symbols: list[str]  # of dict.txt
    masking: dict

    def split(self) -> Split:
        """The validation text. Raises ValueError if the folder has none."""
        if not (self.data / "valid.idx").is_file():
            raise ValueError(f"{self.data} has no held-out text (valid.idx); name the folder that has it with --data")
        return Split(self.data / "valid")

    def blocks(self, split: str) -> MaskedBlocks:
        """Item (0, i) is block i with masks that are the same for all models."""
        length, masks = self.masking["tokens_per_sample"], {k: v for k, v in self.masking.items() if k.endswith("prob")}
        return MaskedBlocks(Blocks(self.data / split, length, self.symbols), self.symbols, HELD_OUT_SEED, **masks)


def load_model(checkpoint: str | Path, data: str | Path | None = None) -> tuple[Model, HeldOut]:
    """(`TupeForMaskedLM` in evaluation mode, its text) of a checkpoint, file or folder. data: folder with dict.txt,
    default: where it was trained, or the folder itself.

    The model computes in float32, also where it was trained in bfloat16 autocast: differences between two sentences are
    often smaller than the rounding of bfloat16.
    Raises ValueError if the checkpoint cannot be read, or the dictionary is not there.
    """
    trained = read_model(checkpoint, mmap=True)
    folder = folders_of(str(data or trained.task["data"]))[0]
    symbols = check_dictionary(trained.weights, folder / "dict.txt")
    model = trained.model()
    if "lm_head.bias" not in trained.weights:
        model.lm_head = None
    model.config.name_or_path, model.config.mask_token_id = str(checkpoint), symbols.index(MASK)
    masking = {name: trained.task.get(name, value) for name, value in MASKING.items()}
    masking["tokens_per_sample"] = min(masking["tokens_per_sample"], trained.config.max_positions)
    return model, HeldOut(folder, symbols, masking)


def warn_if_unlike(label: str, text: HeldOut, first: HeldOut, names: Iterable[str] = MASKING) -> None:
    """Say on standard error why the losses of a model cannot be compared with those of the first one. names: of the
    values of `MASKING` that matter."""
    pairs = {name: (text.masking[name], first.masking[name]) for name in names}
    why = [f"{name} {own}, not {other}" for name, (own, other) in pairs.items() if own != other]
    if text.symbols != first.symbols:
        why.append("another vocabulary")
    if text.data.resolve() != first.data.resolve():
        why.append(f"the text of {text.data}, not of {first.data}: --data takes one for all")
    if why:
        click.echo(f"{label}: its loss is not comparable with that of the first model ({'; '.join(why)})", err=True)


def to_device(model: Any) -> Any:
    """The model, on the GPU if there is one."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def framed(model: Model, words: Tensor, masked: Tensor) -> Tensor:
    """`<s> words </s>` [n, L + 2] of words [n, L], of which those in masked [n, L] are masked."""
    words = words.masked_fill(masked, model.config.mask_token_id)
    return F.pad(F.pad(words, (1, 0), value=BOS), (0, 1), value=EOS)


@torch.inference_mode()
def losses_at(
    model: Model, ids: Tensor, where: tuple[Tensor, Tensor], targets: Tensor, num_tokens: int | None = None
) -> Tensor:
    """[n]: the cross-entropies (nats) of targets [n] at rows and columns [n] of ids [B, L]. num_tokens: see
    `Encoder.packing`. Raises ValueError for a model without a language-model head, and one whose losses are not
    finite."""
    if model.lm_head is None:
        name = model.config.name_or_path
        raise ValueError(f"{name} has no head of a masked language model: it predicts no words")
    encoder = model.tupe.encoder
    device = encoder.tokens.weight.device
    indices = where[0] * ids.size(1) + where[1]
    x, _ = encoder(ids.to(device), False, num_tokens, indices.to(device))
    logits = model.lm_head(x, encoder.tokens.weight).float()  # [n, V]
    losses = F.cross_entropy(logits, targets.to(device), reduction="none").cpu()
    if not losses.isfinite().all():
        raise ValueError("the model's scores are not finite; its training may have diverged")
    return losses


# --------------------------------------------------------------------------------------------- what commands share


def split_label(source: str) -> tuple[str, str]:
    """("", PATH) or (LABEL, PATH) of "PATH" or "LABEL=PATH", either of which may have more "=": what exists decides,
    and the shortest label. Raises ValueError if nothing of it exists."""
    ends = [0, *(match.end() for match in re.finditer("(?<!^)=", source))]
    for end in ends:
        if source[end:] and Path(source[end:]).exists():
            return source[:end].removesuffix("="), source[end:]
    raise ValueError(f"{source} not found; valid: an existing file or folder, as PATH or LABEL=PATH")


def labelled(sources: Iterable[str]) -> dict[str, str]:
    """{label: path} of "LABEL=PATH" or "PATH", which is its own label then. ValueError for a repeated label."""
    paths = {}
    for source in sources:
        label, path = split_label(source)
        label = label or source
        if label in paths:
            raise ValueError(f"{label} stands for both {paths[label]} and {path}; give each its own label")
        paths[label] = path
    return paths


def models(function: Callable) -> Callable:
    """Adds the models to a command, [LABEL=]CHECKPOINT as arguments or after --checkpoint, and --data. The function
    gets `models`, an iterator over (label, model, text), which loads one after the other."""

    @click.argument("checkpoints", nargs=-1, metavar="[LABEL=]CHECKPOINT...")
    @click.option("--checkpoint", multiple=True, metavar="[LABEL=]CHECKPOINT", help="The same. Can be repeated.")
    @options.data("The folder of dict.txt and of the held-out text (default: that of the training).", required=False)
    @functools.wraps(function)
    def command(checkpoints, checkpoint, data, **more):
        paths = labelled([*checkpoints, *checkpoint])
        if not paths:
            raise ValueError("no model is named; give one or more as [LABEL=]CHECKPOINT")

        def load() -> Iterator[tuple[str, Model, HeldOut]]:
            for label, path in paths.items():
                model, text = load_model(path, data)
                yield label, to_device(model), text

        return function(models=load(), **more)

    return command


def write_results(output: Path, name: str, content: dict, text: str, further: dict[str, str] | None = None) -> None:
    """Print the text, and write it as OUTPUT/NAME.md beside OUTPUT/NAME.json. further: texts of more files, by their
    names."""
    click.echo(text, nl=False)  # first: hours of work are not lost where the disk is full
    output.mkdir(parents=True, exist_ok=True)
    files = {
        f"{name}.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
        f"{name}.md": text,
        **(further or {}),
    }
    for file, written in files.items():
        write_atomically(output / file, written)
    seal(output, [*files], command_line())
