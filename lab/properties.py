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
from matplotlib.ticker import NullLocator

from tupe.attention import Recorder
from tupe.common import options
from tupe.common.options import FILE, QuietCommand, seed
from tupe.common.tables import TextTable
from tupe.data.blocks import BOS, EOS
from tupe.data.splits import Split
from tupe.evaluate.loading import HeldOut, load_model, models
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.positions import overrides
from tupe.text import MASK, UNK, TextEncoder

from .plotting import BLUE, GREY, NARROW, SMALL, grid, heat, plt, save

words_option = click.option("--words", type=click.IntRange(1), default=300, show_default=True,
                            help="The number of random words; each makes a sequence.")  # fmt: skip
length_option = click.option(
    "--length", type=click.IntRange(3), help="Tokens of a sequence (default: as many as the model takes)."
)
file_option = click.option("--output", type=FILE, required=True, help="The file to write: .png, .svg or .pdf.")


@torch.no_grad()
def identical_word_attention(
    model: TupeForMaskedLM, symbols: list[str], words: int = 300, length: int | None = None, layer: int = 0,
    seed: int = 1, batch: int = 4,
) -> np.ndarray:  # fmt: skip
    """A [L, L] float64: weights of one layer, averaged over heads and over sequences `<s> w w ... w </s>`.

    Wang et al. (ICLR 2021) probe position encodings so. symbols: the types of its dictionary. words: number of random
    words w, without replacement where there are enough. length: L, at least 3, default the longest. layer: counted
    from 0. Raises ValueError for another layer or length.
    """
    layers, longest = len(model.tupe.encoder.layers), model.config.max_position_embeddings
    if not 0 <= layer < layers:
        raise ValueError(f"unknown layer {layer + 1}; valid, counted from 1: 1 to {layers}")
    length, specials = length or longest, (*TextEncoder.SPECIALS, MASK, UNK)
    if not 3 <= length <= longest:
        raise ValueError(f"a length of {length}; valid: 3 to {longest}, the model's longest")
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


def text_block(text: HeldOut, length: int, split: str = "valid") -> torch.Tensor:
    """[L] ids: `<s>` and the first tokens of a split, at most `length` in all."""
    return torch.tensor([BOS, *Split(text.data / split).tokens[: length - 1].tolist()])


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
@words_option
@length_option
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
    figure, axes = plt.subplots(2, 3, figsize=(NARROW, 4.5), layout="constrained", sharex=True, sharey=True)
    places = dict(zip(("word-word", "word-position", "remainder"), axes[0], strict=True))
    places |= dict(zip(("position-word", "position-position"), axes[1], strict=False))
    for axis in axes.flat:
        axis.set_axis_off()
    for name, matrix in means.items():
        axis = places[name]
        axis.set_axis_on()
        image = heat(axis, matrix, vmin=-limit, vmax=limit)
        axis.set_title(f"{name}\ndeviation {matrix.std():.2f}", fontsize=SMALL)
        axis.locator_params(nbins=3)
        axis.tick_params(labelsize=SMALL)
    axes[0, 0].set_ylabel("query")
    axes[1, 0].set(xlabel="key", ylabel="query")
    axes[1, 1].set_xlabel("key")
    bar = figure.colorbar(image, ax=axes, orientation="horizontal", label="logit", extend="both", aspect=40)
    bar.ax.tick_params(labelsize=SMALL)
    return figure


@click.command("correlations", cls=QuietCommand)
@options.checkpoint("The checkpoint of a pre-training.")
@options.data("The folder of dict.txt (default: that of the training).", required=False)
@length_option
@file_option
def draw_correlations(checkpoint, data, length, output):
    """Draw the word-word, word-position, ... logits of an absolute model's first layer."""
    model, text = load_model(checkpoint, data)
    tokens = text_block(text, length or model.config.max_position_embeddings)
    save(correlations(four_correlations(model, tokens)), output)


def attention_figure(matrices: dict) -> Figure:
    """Attention under identical-word probing, one panel per encoding: label -> A [L, L]. [CLS] and [SEP] are left out;
    the scale of each panel ends at its 99th percentile."""
    figure, axes = grid(len(matrices))
    for axis, (label, matrix) in zip(axes, matrices.items(), strict=False):
        words = matrix[1:-1, 1:-1]
        image = heat(axis, words, first=1, vmin=np.percentile(words, 1), vmax=np.percentile(words, 99))
        axis.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axis, fraction=0.046, extend="both").ax.tick_params(labelsize=SMALL)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure


@click.command("attention", cls=QuietCommand)
@models
@words_option
@length_option
@file_option
def draw_attention(models, words, length, output):
    """Draw the first-layer attention of models under identical-word probing."""
    matrices = {label: identical_word_attention(model, text.symbols, words, length) for label, model, text in models}
    save(attention_figure(matrices), output)


@torch.no_grad()
def t5_bias(model: TupeForMaskedLM) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [2R + 1] from -R to R, bias [H, 2R + 1]) of the first layer's `t5`, up to the offset R where it no
    longer changes. ValueError for a model without it."""
    positions = model.tupe.encoder.positions
    if "t5" not in positions:
        raise ValueError(f"position {positions.name!r} has no 't5'")
    scheme = positions.t5[0] if isinstance(positions.t5, torch.nn.ModuleList) else positions.t5
    reach = min(scheme.max_distance, model.config.max_position_embeddings - 1)
    offsets = torch.arange(-reach, reach + 1)
    return offsets.numpy(), (scheme.multiplier * scheme.table(scheme.bucket_of(offsets))).T.numpy()


def t5_figure(offsets: np.ndarray, bias: np.ndarray) -> Figure:
    """T5's bias by offset, a panel per head, a marker where a bucket begins. bias: [H, offsets]. Offsets are spaced as
    T5's buckets are: evenly up to 8, then logarithmically."""
    rows = -(-len(bias) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(NARROW, 1.5 * rows + 0.4), squeeze=False, sharex=True, sharey=True,
                                layout="constrained")  # fmt: skip
    begins = np.flatnonzero(np.r_[True, (bias[:, 1:] != bias[:, :-1]).any(0)]).tolist()
    for head, (axis, values) in enumerate(zip(axes.flat, bias, strict=False)):
        axis.plot(offsets, values, "o-", color=BLUE, markersize=3, linewidth=1.2, markevery=begins)
        axis.axvline(0, color=GREY, linewidth=0.6)
        axis.set_title(f"head {head + 1}: highest at {offsets[values.argmax()]:+d}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=SMALL)
    axes[0, 0].set_xscale("symlog", base=2, linthresh=8, linscale=1.5)
    ticks = [tick for tick in (0, 4, 16, 64) if tick <= offsets[-1]]
    axes[0, 0].set_xticks([-tick for tick in ticks[:0:-1]] + ticks)
    axes[0, 0].xaxis.set_major_formatter("{x:.0f}")
    axes[0, 0].xaxis.set_minor_locator(NullLocator())
    if len(bias) % 2:
        axes[-1, -1].set_visible(False)
    figure.supxlabel("offset: key - query, in tokens", fontsize=9)
    figure.supylabel("logit", fontsize=9)
    return figure


@click.command("t5", cls=QuietCommand)
@options.checkpoint("The checkpoint of a pre-training.")
@options.data("The folder of dict.txt (default: that of the training).", required=False)
@file_option
def draw_t5(checkpoint, data, output):
    """Draw T5's bias by offset."""
    model, _ = load_model(checkpoint, data)
    save(t5_figure(*t5_bias(model)), output)
