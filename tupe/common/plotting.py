"""The one style of this project's figures. Needs matplotlib (and Pillow, which it needs itself).

Colours are safe for colour-blind readers and ordered by brightness, so that print in grey stays readable; lines differ
in dash and marker too.
"""

import io
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image

from .record import write_atomically

# Okabe and Ito's, dark first, and two more
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B5BD4C", "#BFBFBF"]
DASHES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
HEAT = "cividis"
plt.rcParams.update({"svg.hashsalt": "tupe", "font.size": 9, "figure.dpi": 150, "axes.grid": False})


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix of `path` decides the format (.png, .svg, .pdf). The same figure gives the same bytes.

    Raises ValueError for a suffix that matplotlib does not know.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        write_atomically(path, png(figure))
        return
    undated, content = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}, io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix("."), metadata=undated.get(path.suffix))
    plt.close(figure)
    write_atomically(path, content.getvalue())


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file with a palette of 256 colours: a third of the bytes, and looks the same."""
    drawn, content = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(content, "PNG", optimize=True, dpi=(figure.dpi, figure.dpi))
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


MODELS = ("bert_a", "tupe_r", "tupe_a", "bert_r", "bert_a_d", "tupe_a_tie_cls", "", "", "nopos")  # nopos: the palest


def of_model(name: str, otherwise: int | None = None) -> dict:
    """What the line of a model looks like that many figures show: one colour for each. "TUPE-R" is `tupe_r`, also with
    a size behind it. otherwise: the number of the line of any other model."""
    known = name.lower().replace("-", "_").replace("^", "_")
    for size in ("_tiny", "_mini", "_small", "_large", " tiny", " mini"):
        known = known.removesuffix(size)
    if otherwise is not None and known not in MODELS:
        return style(otherwise)
    return style(MODELS.index(known))


def of_models(labels: Iterable[str]) -> dict[str, dict]:
    """{label: what its line looks like}, no two alike: `of_model`, of a second size of a model the next one."""
    looks = {}
    for label in labels:
        others = map(style, range(len(MODELS), len(MODELS) + 100))
        of_label = (look for look in (of_model(label, len(MODELS)), *others) if look not in looks.values())
        looks[label] = next(of_label, style(len(looks)))
    return looks


def curves(panels: int = 1, width: float = 5.0, height: float = 3.2, rows: int = 1, **options) -> tuple:
    """(figure, array of axes) for lines and bars: panels in rows, `width` and `height` inches each."""
    columns = -(-panels // rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", **options
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
