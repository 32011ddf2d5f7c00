"""Properties of trained position encodings: numbers from the attention to identical words (Wang et al., ICLR 2021), and
where the logits of a BERT come from (figure 2 of the TUPE paper).

L sequence length ([CLS] and [SEP] included), H heads. A: attention weights [L, L]. Wang et al. name the properties; the
formulas of the measures are this project's own.
"""

import math

import click
import numpy as np
import torch
from matplotlib.figure import Figure

from tupe.common import options
from tupe.common.options import FILE, QuietCommand, seed
from tupe.common.plotting import grid, heat, save
from tupe.common.tables import TextTable
from tupe.evaluate.loading import load_model, models, text_block
from tupe.evaluate.probes import identical_word_attention
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.positions import overrides


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


@torch.no_grad()
def four_correlations(model: TupeForMaskedLM, tokens: torch.Tensor) -> dict:
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


@click.command("properties", cls=QuietCommand)
@models
@click.option("--words", type=click.IntRange(1), default=300, show_default=True,
              help="The number of random words; each makes a sequence.")  # fmt: skip
@click.option("--length", type=int, help="Tokens of a sequence (default: as many as the model takes).")
@click.option("--layer", type=int, default=1, show_default=True, help="The layer, counted from 1.")
@seed(help="The seed of the choice of words.")
def properties(models, words, length, layer, seed):
    """Properties of position encodings under identical-word probing (Wang et al.), as a Markdown table."""
    found = {
        label: measures(identical_word_attention(model, text.symbols, words, length, layer - 1, seed))
        for label, model, text in models
    }
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{values[name]:.4g}" for values in found.values())] for name in names]
    click.echo(TextTable.plain(["", *found], rows).markdown(), nl=False)


def correlations(parts: dict) -> Figure:
    """The four correlations of word and position (and the remainder, if it is there), averaged over heads; one colour
    scale for all, its middle at 0. parts: name -> [H, L, L]. The paper's figure 2."""
    means = {name: part.mean(0).numpy() for name, part in parts.items()}
    limit = max(np.percentile(abs(m), 99) for m in means.values())
    figure, axes = grid(len(means), len(means))
    for axis, (name, matrix) in zip(axes, means.items(), strict=True):
        image = heat(axis, matrix, vmin=-limit, vmax=limit)
        axis.set_title(f"{name}\nsd {matrix.std():.3g}", fontsize=9)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes.tolist(), label="logit", shrink=0.8, extend="both")
    return figure


@click.command("correlations", cls=QuietCommand)
@options.checkpoint("The checkpoint of a pre-training.")
@options.data("The folder of dict.txt (default: that of the training).", required=False)
@click.option("--length", type=click.IntRange(3), help="Tokens of a sequence (default: as many as the model takes).")
@click.option("--output", type=FILE, required=True, help="The file to write: .png, .svg or .pdf.")
def draw_correlations(checkpoint, data, length, output):
    """Draw the word-word, word-position, ... logits of an absolute model's first layer."""
    model, text = load_model(checkpoint, data)
    tokens = text_block(text, length or model.config.max_position_embeddings)
    save(correlations(four_correlations(model, tokens)), output)
