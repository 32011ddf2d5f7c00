"""The style of all figures."""

import matplotlib.colors
import numpy as np
import pytest

from lab import plotting


def test_figures_are_readable_in_grey():
    """Brightness rises along the colour map and from colour to colour; lines differ without their colours."""
    weights = [0.2126, 0.7152, 0.0722]
    assert (np.diff(plotting.plt.get_cmap(plotting.HEAT)(np.linspace(0, 1, 32))[:, :3] @ weights) > 0).all()
    assert (np.diff(matplotlib.colors.to_rgba_array(plotting.COLOURS)[:, :3] @ weights) > 0).all()
    styles = [plotting.style(index) for index in range(12)]
    assert len({(style["linestyle"], style["marker"]) for style in styles}) == len(styles)


def drawing():
    figure, axis = plotting.curves()
    for index in range(9):
        axis.plot([0, 1], [index, index], label=f"model {index}", **plotting.style(index))
    plotting.legend(figure)
    return figure


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_are_reproducible(tmp_path, suffix):
    for name in ("a", "b"):
        plotting.save(drawing(), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_the_legend_hides_no_curve():
    figure = drawing()
    figure.canvas.draw()
    (axis,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axis.get_window_extent())
    assert axis.get_window_extent().height > 200  # pixels: the legend took no room from the curves
    plotting.plt.close(figure)
