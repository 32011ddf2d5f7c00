"""What a trained encoder does with positions: functions from a model to arrays.

L sequence length ([CLS] and [SEP] included), H heads. A: attention weights [L, L].
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention import Recorder
from ..data.blocks import BOS, EOS
from ..run import record
from ..text import MASK, UNK, TextEncoder

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

# ----------------------------------------------------------------------------------------------- identical-word probing


@torch.no_grad()
def identical_word_attention(
    model: "TupeForMaskedLM", symbols: list[str], words: int = 300, length: int | None = None, layer: int = 0,
    seed: int = 1, batch: int = 4,
) -> np.ndarray:  # fmt: skip
    """A [L, L] float64: weights of one layer, averaged over heads and over sequences `<s> w w ... w </s>`.

    Wang et al. (ICLR 2021) probe position encodings so. symbols: the types of its dictionary. words: number of random
    words w, without replacement where there are enough. length: L, at least 3, default the longest. layer: counted
    from 0. Raises ValueError for another layer or length.
    """
    _check_layer(model, layer)
    length, specials = _checked_length(model, length, 3), (*TextEncoder.SPECIALS, MASK, UNK)
    ordinary = [i for i, word in enumerate(symbols) if word not in specials and not word.startswith("madeupword")]
    chosen = np.random.default_rng(seed).choice(ordinary, words, replace=words > len(ordinary))
    tokens = torch.from_numpy(chosen)[:, None].repeat(1, length)  # [words, L]
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    total = np.zeros((length, length))
    for part in tokens.split(batch):
        recorder = Recorder(model.tupe.encoder.normaliser)
        model.tupe.encoder(part, backend=recorder)
        total += recorder.weights_of_layers[layer].double().mean(1).sum(0).numpy()
    return total / words


def _check_layer(model, layer):
    layers = len(model.tupe.encoder.layers)
    if not 0 <= layer < layers:  # -1 would go through all layers, and then measure the last one on raw embeddings
        raise ValueError(f"unknown layer {layer + 1}; valid, counted from 1: 1 to {layers}")


def _checked_length(model, length, least):
    longest = model.config.max_position_embeddings
    if length is not None and not least <= length <= longest:
        raise ValueError(f"a length of {length}; valid: {least} to {longest}, the model's longest")
    return length or longest


# -------------------------------------------------------------------------------------- what the parameters say


@torch.no_grad()
def positional_logits(model: "TupeForMaskedLM", length: int | None = None, layer: int = 0) -> torch.Tensor:
    """[H, L, L] content-free logits that a model with `untied` or another bias adds. ValueError if there are none, or
    no such layer or length."""
    _check_layer(model, layer)
    bias, _ = model.tupe.encoder.positions.terms(_checked_length(model, length, 2))[layer]
    if bias is None:
        raise ValueError(f"position {model.tupe.encoder.positions.name!r} has no content-free logits")
    return bias


@torch.no_grad()
def t5_bias(model: "TupeForMaskedLM", layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [2R + 1] from -R to R, bias [H, 2R + 1]) of `t5`, up to the offset R where it no longer changes.
    ValueError for a model without it."""
    _check_layer(model, layer)
    positions = model.tupe.encoder.positions
    if "t5" not in positions:
        raise ValueError(f"position {positions.name!r} has no 't5'")
    scheme = positions.t5[layer] if isinstance(positions.t5, torch.nn.ModuleList) else positions.t5
    reach = min(scheme.max_distance, model.config.max_position_embeddings - 1)
    offsets = torch.arange(-reach, reach + 1)
    return offsets.numpy(), (scheme.multiplier * scheme.table(scheme.bucket_of(offsets))).T.numpy()


# ------------------------------------------------------------------------------------------------- losses of a training


def losses_of(folder: str | Path) -> tuple:
    """(updates, validation losses in bits per masked token), two lists, of the folder of a pre-training. Raises
    ValueError if there are none, also of a fine-tuning."""
    run = record.read(folder)
    is_pretraining = run is not None and not run.metrics
    entries = [entry for entry in run.scores if entry["split"] == run.splits[0]] if is_pretraining else []
    if not entries:
        raise ValueError(f"{folder} has no validation losses; valid: the folder of a pre-training")
    return [entry["num_updates"] for entry in entries], [entry["loss"] for entry in entries]
