"""The pages' pictures: what is drawn is what the tables say, and it can be read on a phone."""

import csv
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from lab import discovered, gallery, pictures, plotting
from lab.known import FIRST
from tupe.encoder import Encoder
from tupe.positions import HOOKS, SCHEMES, overrides

DOCS = FIRST.parent
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawn():
    """{name: figure} of all pictures."""
    figures = dict(pictures.pictures())
    heads = [
        gallery.Head(1 + n // 2, 1 + n % 2, np.eye(8)[:, [*range(1, 8), 0]] / (1 + n), 1.5, -20.0 * np.eye(8))
        for n in range(4)
    ]
    yield figures | {"gallery": gallery.portrait(heads, tokens=6)}
    plotting.plt.close("all")


def texts(figure):
    """What is written in a figure, labels of ticks that are seen included."""
    figure.canvas.draw()
    ticks, seen = set(), []
    for axis in figure.axes:
        for along in (axis.xaxis, axis.yaxis):
            for tick in (*along.get_major_ticks(), *along.get_minor_ticks()):
                ticks |= {tick.label1, tick.label2}
            low, high = sorted(along.get_view_interval())
            if axis.get_visible() and axis.axison:
                labels = zip(along.get_ticklocs(), along.get_ticklabels(), strict=True)
                seen += [label for place, label in labels if low <= place <= high]
    hidden = {text for axis in figure.axes if not axis.get_visible() for text in axis.findobj(Text)}
    return [text for text in (*({*figure.findobj(Text)} - ticks - hidden), *seen) if text.get_text().strip()]


@pytest.mark.parametrize("name", ["layer", "forest", "delays", "extrapolation", "gallery"])
def test_a_picture_can_be_read_on_a_phone(drawn, name):
    """It is so narrow, and its letters so large, that they keep 8.5 of 360 / 345 pixels; they are whole, and none
    covers another."""
    figure = drawn[name]
    found = texts(figure)
    assert figure.get_figwidth() == plotting.NARROW and len(found) > 10
    page = figure.bbox.padded(1)
    boxes = [(text.get_text(), text.get_fontsize(), Text.get_window_extent(text)) for text in found]
    for n, (words, size, box) in enumerate(boxes):
        assert size >= pictures.SMALL, words
        assert page.contains(*box.min) and page.contains(*box.max), words
        for other, _, its_box in boxes[:n]:
            assert not box.padded(-1).overlaps(its_box.padded(-1)), f"{words} covers {other}"


def test_the_layer_has_every_hook_with_an_encoding_that_uses_it(drawn):
    hooks = [step for step in pictures.STEPS if isinstance(step, pictures.Hook)]
    assert sorted(hook.name for hook in hooks) == sorted(HOOKS)
    words = [text.get_text().strip() for text in texts(drawn["layer"])]
    for hook in hooks:
        assert overrides(SCHEMES[hook.example], hook.name)
        assert {hook.name, hook.example, hook.does} <= {*words}


@pytest.mark.parametrize(
    "hook", [step for step in pictures.STEPS if isinstance(step, pictures.Hook)], ids=lambda x: x.name
)
def test_a_hook_runs_as_often_as_the_layer_says(hook, monkeypatch):
    calls, scheme = [], SCHEMES[hook.example]
    original = getattr(scheme, hook.name)
    monkeypatch.setattr(scheme, hook.name, lambda self, *a, **k: calls.append(1) or original(self, *a, **k))
    cls = "untied" if hook.name == "cls_bias" else "tied"
    sizes = {"layers": 3, "width": 16, "ffn": 16, "heads": 2, "max_positions": 8}
    encoder = Encoder(20, 1, position=hook.example, cls=cls, attention="plain", **sizes)
    calls.clear()
    encoder(torch.randint(4, 20, (2, 8)))
    assert len(calls) == (3 if hook.in_every_layer else 1)


def test_the_forest_is_the_tables_of_the_results(drawn):
    """Each row of the two tables of docs/results.md, with mean, interval and verdict."""
    (axis,) = drawn["forest"].axes
    groups = pictures.claims(pictures.Runs())
    rows = [line for lines in groups.values() for line in lines]
    assert len(groups) == 11 and len(rows) == 5 * 3 + 6 * 2
    for line in rows:
        assert (
            f"{line.mean + 0.0:.2f} [{line.interval[0] + 0.0:.2f}, {line.interval[1] + 0.0:.2f}] | {line.verdict}"
            in RESULTS
        )
    means = [one for one in axis.lines if one.get_marker() in "os^"]
    assert [one.get_xdata()[0] for one in means] == [line.mean for line in rows]
    hollow = [one.get_markerfacecolor() == "white" for one in means]
    assert hollow == [line.verdict == "not resolved" for line in rows] and 5 < sum(hollow) < 20
    verdicts = [text.get_text() for text in axis.texts]
    assert all(
        verdicts.count(verdict) == [line.verdict for line in rows].count(verdict) for verdict in ("confirmed", "lower")
    )


def test_delays_and_offsets_are_those_of_the_table(drawn):
    found = pictures.leads_in()
    assert [len(models) for models in found.values()] == [8 + 1, 8 + 1, 2, 1, 3]
    delay, offset = found["mini, constant rate"]["tupe_a"]
    rows = {row["run"]: row for row in csv.DictReader((FIRST / "delay.csv").open(encoding="utf-8"))}
    runs = [rows[f"lasting/tupe_a/mini_8000_lr0.001_seed{seed}"] for seed in (1, 2, 3)]
    assert delay.values == [float(row["fit_delay"]) for row in runs]
    assert offset.values == [float(row["fit_offset"]) for row in runs]
    assert "{:.2f} [{:.2f}, {:.2f}] bits higher".format(offset.mean, *offset.interval) in " ".join(RESULTS.split())
    behind = found["mini, rate decays"]["absolute_0.06"][1]
    low, high = behind.interval
    assert f"it is {-behind.mean:.2f} [{-high:.2f}, {-low:.2f}] bits *behind*" in " ".join(RESULTS.split())
    assert found["mini, rate decays"]["untied_raw"][1] is None  # it left the plateau too late
    left, right = drawn["delays"].axes
    count = sum(map(len, found.values()))
    assert [sum(one.get_marker() in "os" for one in axis.lines) for axis in (left, right)] == [count, count - 1]


def test_long_inputs_are_named_lines(drawn):
    models = json.loads((DOCS / "extrapolation.json").read_text(encoding="utf-8"))["models"]
    longer = {name for name, losses in models.items() if len(losses) > 1}
    assert {*pictures.AS_TRAINED, *pictures.ALTERED} == longer
    for axis, names in zip(drawn["extrapolation"].axes, (pictures.AS_TRAINED, pictures.ALTERED), strict=True):
        assert sorted(text.get_text() for text in axis.texts) == sorted(names) and axis.get_legend() is None
        for container, name in zip(axis.containers, names, strict=True):
            assert list(container.lines[0].get_ydata()) == [loss["mean"] for loss in models[name]]
        looks = {(one.lines[0].get_color(), one.lines[0].get_marker()) for one in axis.containers}
        assert len(looks) == len(names)


def test_words_have_the_contrast_that_accessibility_asks_for():
    for colour in (*plotting.INKS, *discovered.TEN_COLOURS, pictures.GREY):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        assert 1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05) >= 4.5, colour


def test_the_command_writes_what_is_committed(drawn, tmp_path, monkeypatch):
    """... as far as sizes tell: other versions of matplotlib draw other pixels."""
    monkeypatch.setattr(pictures, "pictures", lambda: [(name, drawn[name]) for name in ("layer", "forest")])
    result = CliRunner().invoke(pictures.command, [f"--output={tmp_path}/new"])
    assert result.exit_code == 0, result.output
    for name in ("layer", "forest"):
        ours, committed = (Image.open(folder / f"{name}.png") for folder in (tmp_path / "new", DOCS / "figures"))
        assert ours.size == committed.size and ours.size[0] == 720
