"""What a trained encoder does with positions: functions from a model to arrays, and numbers from arrays.

B batch, L sequence length ([CLS] and [SEP] included), C model width, H heads, D = C / H. A: attention weights [L, L].

Wang et al. (ICLR 2021) name the properties of position embeddings that are measured here, and probe them with identical
words. The formulas of the four measures below are this project's own.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import torch

from ..common.options import QuietCommand, seed
from ..common.tables import TextTable
from ..data.blocks import BOS, EOS
from ..positions import overrides
from ..run import record
from ..text import MASK, UNK, TextEncoder
from .loading import models

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

# ----------------------------------------------------------------------------------------------- identical-word probing


@torch.no_grad()
def identical_word_attention(
    model: "TupeForMaskedLM", symbols: list[str], words: int = 300, length: int | None = None, layer: int = 0,
    seed: int = 1, batch: int = 4,
) -> np.ndarray:  # fmt: skip
    """A [L, L] float64: weights of one layer, averaged over heads and over sequences `<s> w w ... w </s>`.

    symbols: the types of its dictionary. words: number of random words w, without replacement where there are enough.
    length: L, at least 3, default the
    longest. layer: counted from 0. Raises ValueError for another layer or length.
    """
    _check_layer(model, layer)
    length, specials = _checked_length(model, length, 3), (*TextEncoder.SPECIALS, MASK, UNK)
    ordinary = [i for i, word in enumerate(symbols) if word not in specials and not word.startswith("madeupword")]
    chosen = np.random.default_rng(seed).choice(ordinary, words, replace=words > len(ordinary))
    tokens = torch.from_numpy(chosen)[:, None].repeat(1, length)  # [words, L]
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    total = np.zeros((length, length))
    for part in tokens.split(batch):
        total += model.tupe.encoder.attention_weights(part, layer).double().mean(1).sum(0).numpy()
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


def measures(attention: np.ndarray) -> dict:
    """All measures of one A [L, L] whose first and last positions are [CLS] and [SEP], by name."""
    inner = attention[1:-1, 1:-1]
    return {
        "monotonicity violation": monotonicity_violation(inner),
        "monotonicity violation, first 20 offsets": monotonicity_violation(inner, 20),
        "translation violation": translation_violation(inner),
        "translation violation with [CLS], [SEP]": translation_violation(attention),
        "symmetry violation": symmetry_violation(inner),
        "direction balance": direction_balance(inner),
    }


def monotonicity_violation(attention: np.ndarray, offsets: int | None = None) -> float:
    """Share of the triples (x, m, n), 1 <= m < n <= offsets, for which A[x, x + n] > A[x, x + m], and likewise to the
    left: weights should fall with the distance. NaN without such a triple."""
    violations = triples = 0
    for matrix in (attention, attention[::-1, ::-1]):  # to the right, to the left
        for x, row in enumerate(matrix):
            weights = row[x + 1 :][:offsets]  # distance 1, 2, ...
            near, far = np.triu_indices(len(weights), 1)
            violations += int((weights[near] < weights[far]).sum())
            triples += len(near)
    return violations / triples if triples else math.nan


def translation_violation(attention: np.ndarray) -> float:
    """Variance within diagonals over total variance: 0 if A[i, j] depends on j - i only. NaN if A is constant."""
    length = len(attention)
    within = sum(squares(attention.diagonal(offset)) for offset in range(1 - length, length))
    total = squares(attention.ravel())
    return within / total if total else math.nan


def squares(values: np.ndarray) -> float:
    """Sum of squared deviations from the mean; exactly 0 for equal values."""
    shifted = values - values[0]
    return float(((shifted - shifted.mean()) ** 2).sum())


def symmetry_violation(attention: np.ndarray) -> float:
    """Mean of |A[i, j] - A[j, i]| over i != j. NaN for a single position."""
    i, j = np.triu_indices(len(attention), 1)
    return float(np.abs(attention[i, j] - attention[j, i]).mean()) if len(i) else math.nan


def direction_balance(attention: np.ndarray) -> float:
    """Weights on later positions over weights on earlier ones. NaN if there are neither."""
    forward, backward = np.triu(attention, 1).sum(), np.tril(attention, -1).sum()
    if not backward:
        return math.inf if forward else math.nan
    return float(forward / backward)


# -------------------------------------------------------------------------------------- what the parameters say


@torch.no_grad()
def four_correlations(model: "TupeForMaskedLM", tokens: torch.Tensor) -> dict:
    """First-layer logits of a model with absolute positions, split by their origin: name -> [H, L, L].

    tokens: [L]. The layer norm after the sum of word and position is linear once its sigma is given:
    x_i = gamma (centred w_i + centred p_i) / sigma_i + beta. "remainder" is every product with beta or a projection
    bias. Raises ValueError if the logits have other parts than these.
    """
    encoder = model.tupe.encoder
    positions, config = encoder.positions, encoder.config
    word, position = encoder.tokens(tokens), positions.embed(len(tokens))
    is_bert = config.block != "gau" and not config.unlike_bert() and encoder.segments is None
    others = any(overrides(scheme, "bias", "content", "rotate") for scheme in positions.of_layer(0))
    if position is None or others or positions.untie_cls or not is_bert:
        raise ValueError(
            f"position {positions.name!r}, cls {positions.cls!r}, block {config.block!r}: words and positions are "
            "split for BERT-A only: absolute positions, [CLS] tied, BERT's block, no segments"
        )
    attention, norm = encoder.layers[0].attention, encoder.embed_norm
    sigma = ((word + position).var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    w_q, w_k, _ = attention.qkv.weight.chunk(3)
    q, k = {}, {}
    for name, x in (("word", word), ("position", position)):
        x = norm.weight * (x - x.mean(-1, keepdim=True)) / sigma
        q[name], k[name] = ((x @ w.T).unflatten(1, (attention.heads, -1)).transpose(0, 1) for w in (w_q, w_k))
    products = {f"{a}-{b}": q[a] @ k[b].transpose(1, 2) * positions.scale for a in q for b in k}
    whole_q, whole_k, _ = attention.project(encoder.embed(tokens[None]))
    logits = whole_q[0] @ whole_k[0].transpose(1, 2) * positions.scale
    return {**products, "remainder": logits - sum(products.values())}


@torch.no_grad()
def positional_logits(model: "TupeForMaskedLM", length: int | None = None, layer: int = 0) -> torch.Tensor:
    """[H, L, L] content-free logits that a model with `untied` or another bias adds. ValueError if there are none, or
    no such layer or length."""
    _check_layer(model, layer)
    bias, _ = model.tupe.encoder.positions.terms(_checked_length(model, length, 2))[layer]
    if bias is None:
        raise ValueError(f"position {model.tupe.encoder.positions.name!r} has no content-free logits")
    return bias


def pattern(logits: torch.Tensor) -> str:
    """The pattern of one head's positional logits [L, L] (with [CLS] at 0): global, next, previous, local or broad.

    Judged by P = softmax of the rows without [CLS], averaged over the middle half of the rows, the first that holds:
    global: the entropy of P is at least 98 % of that of equal weights. next, previous: at least three quarters of the
    weight on other positions is on later, on earlier ones. local: at least half of the weight lies within L/16 (at
    least 1) of the position. broad: everything else.
    """
    weights = torch.softmax(logits[1:, 1:].double(), dim=-1)
    length = len(weights)
    i = torch.arange(length)
    middle = slice(length // 4, length - length // 4)
    offset = (i[None] - i[:, None])[middle]
    weights = weights[middle]

    def share(where):
        return (weights * where).sum(1).mean().item()

    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(1).mean().item()
    if entropy >= 0.98 * math.log(length):
        return "global"
    later, earlier = share(offset > 0), share(offset < 0)
    if later >= 0.75 * (later + earlier):
        return "next"
    if earlier >= 0.75 * (later + earlier):
        return "previous"
    return "local" if share(offset.abs() <= max(1, length // 16)) >= 0.5 else "broad"


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


# --------------------------------------------------------------------------------------------------------- the command


@click.command(cls=QuietCommand)
@models
@click.option("--words", type=click.IntRange(1), default=300, show_default=True,
              help="The number of random words; each makes a sequence.")  # fmt: skip
@click.option("--length", type=int, help="Tokens of a sequence (default: as many as the model takes).")
@click.option("--layer", type=int, default=1, show_default=True, help="The layer, counted from 1.")
@seed(help="The seed of the choice of words.")
def command(models, words, length, layer, seed):
    """Properties of position encodings under identical-word probing (Wang et al.), as a Markdown table."""
    found = {
        label: measures(identical_word_attention(model, text.symbols, words, length, layer - 1, seed))
        for label, model, text in models
    }
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{values[name]:.4g}" for values in found.values())] for name in names]
    click.echo(TextTable.plain(["", *found], rows).markdown(), nl=False)
