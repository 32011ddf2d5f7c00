"""Figures from the arrays of `tupe.probes`. Colours are safe for colour-blind readers and fall in brightness, so that
print in grey stays readable; lines differ in dash and marker too.

L sequence length, H heads.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.manifold import TSNE

from .probes import pattern

COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # Okabe and Ito
DASHES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
HEAT = "cividis"
plt.rcParams.update({"svg.hashsalt": "tupe", "font.size": 9, "figure.dpi": 150, "axes.grid": False})


def save(figure, stem):
    """Write stem.png and stem.svg; the same figure gives the same bytes."""
    figure.savefig(f"{stem}.png", metadata={"Software": None})
    figure.savefig(f"{stem}.svg", metadata={"Date": None})
    plt.close(figure)


def style(index):
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def grid(panels, columns, size=2.2, beside=0.0):
    """Figure and flat array of axes for square panels, inches wide and high; axes that are left over are hidden.
    beside: what each panel needs for its colour bar."""
    rows = -(-panels // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=((size + beside) * columns + 0.8, (size + 0.4) * rows + 0.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return figure, axes.flatten()


def heat(axis, matrix, **options):
    image = axis.imshow(matrix, cmap=HEAT, interpolation="nearest", **options)
    axis.tick_params(labelsize=7)
    return image


def correlations(parts, title=""):
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
    figure.suptitle(title)
    return figure


def positional(logits, title=""):
    """Positional logits of every head, [H, L, L], without [CLS]; each head labelled by `probes.pattern` and with its
    own colour scale (printed above it). The paper's figure 6."""
    figure, axes = grid(len(logits), min(len(logits), 4))
    for head, (axis, matrix) in enumerate(zip(axes, logits, strict=False)):
        words = matrix[1:, 1:].numpy()
        heat(axis, words)
        axis.set_title(f"head {head + 1}: {pattern(matrix)}\n{words.min():.2g} to {words.max():.2g}", fontsize=9)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    figure.suptitle(title)
    return figure


def losses(curves, title=""):
    """Validation losses by updates. curves: label -> (updates, losses)."""
    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for index, (label, (updates, values)) in enumerate(curves.items()):
        axis.plot(updates, values, label=label, markersize=3, linewidth=1.2, **style(index))
    axis.set_xlabel("updates")
    axis.set_ylabel("validation loss (bits per masked token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.suptitle(title)
    return figure


def t5(offsets, bias, title=""):
    """T5's bias by offset, one line per head, a marker where a bucket begins. bias: [H, offsets]. Offsets are spaced as
    T5's buckets are: evenly up to 8, then logarithmically."""
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    begins = np.flatnonzero(np.r_[True, (bias[:, 1:] != bias[:, :-1]).any(0)]).tolist()
    for head, values in enumerate(bias):
        axis.plot(offsets, values, label=f"head {head + 1}", markersize=3, markevery=begins, linewidth=1, **style(head))
    axis.set_xscale("symlog", base=2, linthresh=8, linscale=2.5)
    ticks = [tick for tick in (0, 4, 8, 16, 32, 64, 128) if tick <= offsets[-1]]
    axis.set_xticks([-tick for tick in ticks[:0:-1]] + ticks)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel("offset (key - query)")
    axis.set_ylabel("logit")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=2)
    figure.suptitle(title)
    return figure


def attention(matrices, title=""):
    """Attention under identical-word probing, one panel per encoding: label -> A [L, L]. [CLS] and [SEP] are left out;
    the scale of each panel ends at its 99th percentile."""
    figure, axes = grid(len(matrices), min(len(matrices), 3), size=2.3, beside=0.8)
    for axis, (label, matrix) in zip(axes, matrices.items(), strict=False):
        words = matrix[1:-1, 1:-1]
        image = heat(axis, words, vmin=np.percentile(words, 1), vmax=np.percentile(words, 99))
        axis.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axis, fraction=0.046, extend="both").ax.tick_params(labelsize=7)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    figure.suptitle(title)
    return figure


def tsne(vectors, title="", seed=0):
    """Position vectors [L, C] in two dimensions by t-SNE; colour and a few numbers give the position, and a line joins
    neighbours."""
    perplexity = min(30, (len(vectors) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(vectors)
    figure, axis = plt.subplots(figsize=(4.8, 4), layout="constrained")
    axis.plot(*points.T, color="0.8", linewidth=0.6, zorder=1)
    image = axis.scatter(*points.T, c=np.arange(len(points)), cmap=HEAT, s=14, edgecolors="0.4", linewidths=0.3)
    for position in range(0, len(points), max(len(points) // 16, 1)):
        axis.annotate(str(position), points[position], fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])
    figure.colorbar(image, label="position")
    figure.suptitle(title)
    return figure


def phi(m, before, after, title=""):
    """phi(m) = sum cos(omega_i m) of sinusoids whose frequencies are learned."""
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for index, (label, values) in enumerate([("before learning", before), ("after learning", after)]):
        axis.plot(m, values, label=label, markersize=3, markevery=8, linewidth=1.2, **style(index))
    axis.set_xlabel("offset m")
    axis.set_ylabel(r"$\phi(m) = \sum_i \cos(\omega_i m)$")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.suptitle(title)
    return figure
