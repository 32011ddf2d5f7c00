"""The one style of this project's figures. Needs matplotlib.

Colours are safe for colour-blind readers and ordered by brightness, so that print in grey stays readable; lines differ
in dash and marker too.
"""

import io
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from ..run.folder import write_atomically

# Okabe and Ito's, dark first, and two more
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B5BD4C", "#BFBFBF"]
DASHES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
HEAT = "cividis"
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same figure gives the same bytes
plt.rcParams.update({"svg.hashsalt": "tupe", "font.size": 9, "figure.dpi": 150, "axes.grid": False})


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix of `path` decides the format (.png, .svg, .pdf). Raises ValueError for a suffix that
    matplotlib does not know."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, drawn(figure, path.suffix))


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    return drawn(figure, ".png")


def drawn(figure: Figure, suffix: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=suffix.removeprefix("."), metadata=UNDATED.get(suffix))
    plt.close(figure)
    return content.getvalue()


def style(index: int) -> dict:
    """What the line number `index` of a figure looks like."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 3,
        "linewidth": 1.2,
    }


def curves(panels: int = 1, width: float = 5.0, height: float = 3.2, **options) -> tuple:
    """(figure, array of axes) for lines and bars: panels in a row, `width` and `height` inches each."""
    figure, axes = plt.subplots(
        1, panels, figsize=(width * panels, height), squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure, axes.flatten()


def legend(figure: Figure, columns: int = 1) -> None:
    """The lines of all panels, each once, below the axes, where they hide no curve; the figure grows with them."""
    lines = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    handles, labels = list(lines.values()), list(lines)
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * rows + 0.1)  # inches, of a line of text
    box = figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=columns, frameon=False)
    width = box.get_window_extent(figure.canvas.get_renderer()).width / figure.dpi
    figure.set_figwidth(max(figure.get_figwidth(), width + 0.2))


def grid(panels: int, columns: int, size: float = 2.2, beside: float = 0.0) -> tuple:
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


def heat(axis: Axes, matrix: np.ndarray, first: int = 0, **options) -> AxesImage:
    """Show a matrix, whose rows and columns are counted from `first`; returns the image, for a colour bar."""
    rows, columns = matrix.shape
    extent = (first - 0.5, first + columns - 0.5, first + rows - 0.5, first - 0.5)
    image = axis.imshow(matrix, cmap=HEAT, interpolation="nearest", extent=extent, **options)
    axis.tick_params(labelsize=7)
    return image
