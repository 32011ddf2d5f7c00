"""The one style of this project's figures. Needs matplotlib.

Colours are safe for colour-blind readers and ordered by brightness, so that print in grey stays readable; lines differ
in dash and marker too.
"""

import io
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image

from tupe.run.folder import write_atomically

# Okabe and Ito's, dark first, and two more
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B5BD4C", "#BFBFBF"]
DASHES = ["-", "--", "-.", ":"]
INKS = ["#000000", "#0072B2", "#B34700", "#007A5A", "#A3497F", "#8A6000", "#882255"]  # dark enough for words, too
BLUE, RED, GREY = INKS[1], INKS[2], "#555555"
SMALL = 8.5  # points, the smallest letters of a page's picture
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
HEAT = "cividis"
NARROW = 4.8  # inches, the width of a picture whose words of 8.5 points can be read on a phone, 360 pixels wide
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # the same figure gives the same bytes
plt.rcParams.update({"svg.hashsalt": "tupe", "font.size": 9, "figure.dpi": 150, "axes.grid": False})


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix of `path` decides the format (.png, .svg, .pdf). Raises ValueError for a suffix that
    matplotlib does not know."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content, suffix = io.BytesIO(), path.suffix
    box = "tight" if figure.legends else None  # with what stands below the axes
    figure.savefig(content, format=suffix.removeprefix("."), metadata=UNDATED.get(suffix), bbox_inches=box)
    plt.close(figure)
    if suffix == ".png":  # with a palette, a quarter of the bytes
        image = Image.open(content).convert("RGB").quantize(255, dither=Image.Dither.NONE)
        image.save(content := io.BytesIO(), "png", optimize=True)
    write_atomically(path, content.getvalue())


def style(index: int) -> dict:
    """What the line number `index` of a figure looks like."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 3,
        "linewidth": 1.2,
    }


def curves(height: float = 3.2) -> tuple[Figure, Axes]:
    """A figure with one axes for lines, `height` inches high."""
    figure, axis = plt.subplots(figsize=(NARROW, height), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    return figure, axis


def name_lines(axis: Axes, ends: list[tuple[float, str, str]], x: float, beside: float, apart: float) -> None:
    """Words beside the ends of lines, in place of a legend. ends: (y, words, colour) of lines that end at `x`; words
    stand at `x + beside`, to the left if that is negative, moved up until they are `apart`."""
    at, side = -math.inf, "right" if beside < 0 else "left"
    for y, words, colour in sorted(ends):
        at = max(y, at + apart)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        line["relpos"] = (1 if beside < 0 else 0, 0.5)
        axis.annotate(words, (x, y), (x + beside, at), color=colour, ha=side, va="center", arrowprops=line)


def legend(figure: Figure, columns: int = 1) -> None:
    """The lines of the axes, below them, where they hide no curve; the picture grows with them."""
    figure.legend(loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=SMALL, ncols=columns, frameon=False)


def grid(panels: int) -> tuple[Figure, np.ndarray]:
    """Figure and flat array of axes for square panels, two in a row; one that is left over is hidden."""
    rows = -(-panels // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(NARROW, 2.45 * rows + 0.35), squeeze=False, layout="constrained")
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return figure, axes.flatten()


def heat(axis: Axes, matrix: np.ndarray, first: int = 0, **options) -> AxesImage:
    """Show a matrix, whose rows and columns are counted from `first`; returns the image, for a colour bar."""
    rows, columns = matrix.shape
    extent = (first - 0.5, first + columns - 0.5, first + rows - 0.5, first - 0.5)
    image = axis.imshow(matrix, cmap=HEAT, interpolation="nearest", extent=extent, **options)
    axis.tick_params(labelsize=SMALL)
    return image
