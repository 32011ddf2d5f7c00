"""The style of all figures."""

import matplotlib.colors
import numpy as np

from tupe.common import plotting


def test_figures_are_readable_in_grey():
    """Brightness rises along the colour map and from colour to colour; lines differ without their colours."""
    weights = [0.2126, 0.7152, 0.0722]
    assert (np.diff(plotting.plt.get_cmap(plotting.HEAT)(np.linspace(0, 1, 32))[:, :3] @ weights) > 0).all()
    assert (np.diff(matplotlib.colors.to_rgba_array(plotting.COLOURS)[:, :3] @ weights) > 0).all()
    styles = [plotting.style(index) for index in range(12)]
    assert len({(style["linestyle"], style["marker"]) for style in styles}) == len(styles)
