"""The pictures that explain."""

import numpy as np

from lab import diagrams
from tupe.positions import SCHEMES, PositionScheme


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_every_scheme_stands_below_each_hook_that_it_overrides():
    shown = texts(diagrams.hooks())
    for name, scheme in SCHEMES.items():
        for hook in diagrams.HOOKS:
            (names,) = (text for text in shown[shown.index(f"{hook}()") :][1:2])
            assert (name in names.split("\n")) == (getattr(scheme, hook) is not getattr(PositionScheme, hook))
    hooks = {name for name, value in vars(PositionScheme).items() if callable(value) and name[0] != "_"}
    assert hooks - {"forward"} == {*diagrams.HOOKS, "cls_bias", "unrotate"}  # which go with `bias` and `rotate`


def test_the_maps_of_positions_leave_cls_out():
    maps = diagrams.maps()
    for name in ("apart", "bias"):
        assert np.isnan(maps[name][0]).all() and np.isnan(maps[name][:, 0]).all()
    assert not np.isnan(maps["words"]).any()
    assert texts(diagrams.idea()).count("+") == 5
