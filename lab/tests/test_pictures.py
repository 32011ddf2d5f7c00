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

from lab import discovered, gallery, pictures, plotting, sketches
from lab.known import FIRST
from lab.recompute import cost
from tupe.encoder import Encoder
from tupe.positions import HOOKS, SCHEMES, overrides

DOCS = FIRST.parent
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawn():
    """{name: figure} of all pictures."""
    figures = {name: draw() for name, draw in pictures.PICTURES.items()}
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
                labels = zip(along.get_ticklocs(), along.get_ticklabels(), strict=False)  # none of hidden labels
                seen += [label for place, label in labels if low <= place <= high]
    hidden = {text for axis in figure.axes if not axis.get_visible() for text in axis.findobj(Text)}
    return [text for text in (*({*figure.findobj(Text)} - ticks - hidden), *seen) if text.get_text().strip()]


@pytest.mark.parametrize("name", [*pictures.PICTURES, "gallery"])
def test_a_picture_can_be_read_on_a_phone(drawn, name):
    """It is so narrow, and its letters so large, that they keep 8.5 of 360 / 345 pixels; they are whole, and none
    covers another."""
    figure = drawn[name]
    found = texts(figure)
    assert figure.get_figwidth() == plotting.NARROW and len(found) > 10
    page = figure.bbox.padded(1)
    boxes = [(text.get_text(), text.get_fontsize(), Text.get_window_extent(text)) for text in found]
    for n, (words, size, box) in enumerate(boxes):
        assert size >= plotting.SMALL, words
        assert page.contains(*box.min) and page.contains(*box.max), words
        for other, _, its_box in boxes[:n]:
            assert not box.padded(-1).overlaps(its_box.padded(-1)), f"{words} covers {other}"


def test_the_layer_has_every_hook_with_an_encoding_that_uses_it(drawn):
    hooks = [step for step in sketches.STEPS if isinstance(step, sketches.Hook)]
    assert sorted(hook.name for hook in hooks) == sorted(HOOKS)
    words = [text.get_text().strip() for text in texts(drawn["layer"])]
    for hook in hooks:
        assert overrides(SCHEMES[hook.example], hook.name)
        assert {hook.name, hook.example, hook.does} <= {*words}


@pytest.mark.parametrize(
    "hook", [step for step in sketches.STEPS if isinstance(step, sketches.Hook)], ids=lambda x: x.name
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
    for colour in (*plotting.INKS, *discovered.TEN_COLOURS, plotting.GREY):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        assert 1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05) >= 4.5, colour


def said(page, picture):
    """The alternative text of a page's picture."""
    before, _, after = page.read_text(encoding="utf-8").partition(f"figures/{picture}.png)")
    assert after
    return before.rpartition("![")[2]


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "results.md"], ids=["README", "results"])
def test_losses_of_mini_models_are_those_of_the_rows(drawn, page):
    runs = pictures.tables()
    found = pictures.of_stage(runs, "lasting", pictures.LASTING, 8000)
    (axis,) = drawn["losses"].axes
    exits, ends = {}, {}
    for model, line in zip(found, axis.lines, strict=False):
        assert len(found[model]) == 3
        losses = np.mean([curve[1] for _, curve in found[model]], axis=0)
        assert line.get_ydata() == pytest.approx(losses)
        exits[model] = [runs.exit(trial) for trial, _ in found[model]]
        ends[model] = losses[-1]
    tupe = exits["tupe_a"] + exits["tupe_r"]
    text = said(page, "losses")
    assert f"TUPE-R leave the plateau after {min(tupe):,.0f} to {max(tupe):,.0f} updates" in text
    assert "BERT-A after {:,.0f} to {:,.0f};".format(min(exits["bert_a"]), max(exits["bert_a"])) in text
    assert "BERT-A's stays the highest" in text and max(ends, key=ends.get) == "bert_a"


def test_the_losses_after_the_exits_are_those_of_the_rows(drawn):
    runs = pictures.tables()
    found, lines = pictures.after_exits(runs), drawn["aligned"].axes[0].lines
    for line, (model, of_seeds) in zip(lines, found.items(), strict=True):
        xs, last = line.get_xdata(), min(curve[0][-1] for curve in of_seeds)
        assert xs[0] == 0 and xs[-1] <= last < xs[-1] + 50
        for (updates, losses), (trial, curve) in zip(
            of_seeds, pictures.of_stage(runs, "lasting", [model], 8000)[model], strict=True
        ):
            assert losses[20] == pytest.approx(np.interp(runs.exit(trial) + 1000, *curve)) and updates[20] == 1000
            assert runs.exit(trial) + updates[-1] <= 6400  # where the rate begins to fall
        assert line.get_ydata()[0] == pytest.approx(runs.threshold)  # all begin where a plateau ends
    bert, *tupe = ([np.interp(n, *line.get_data()) for n in range(200, 4400, 200)] for line in lines)
    assert all(np.greater(bert, one).all() for one in tupe)  # "stays above them"


def test_the_moved_exits_are_those_of_the_rows(drawn):
    runs = pictures.tables()
    whole, past = drawn["intervention"].axes
    found, moved = pictures.of_stage(runs, "delay", pictures.MOVED, 5000), {}
    for model, by_updates, by_exit in zip(pictures.MOVED, whole.lines, past.lines, strict=False):
        assert by_updates.get_ydata() == pytest.approx(np.mean([curve[1] for _, curve in found[model]], axis=0))
        at = [np.interp(runs.exit(trial) + 2000, *curve) for trial, curve in found[model]]
        moved[model] = np.interp(2000, *by_exit.get_data())
        assert moved[model] == pytest.approx(np.mean(at), abs=0.02)
    exits = {model: [runs.exit(trial) for trial, _ in pairs] for model, pairs in found.items()}
    text = said(DOCS / "results.md", "intervention")
    assert "given trained position vectors leaves early and then falls onto BERT-A's curve" in text
    assert max(exits["bert_a_trained"]) < min(exits["bert_a"])
    assert abs(moved["bert_a_trained"] - moved["bert_a"]) < 0.05
    assert "switched on late leaves last and stays below both" in text
    assert min(exits["tupe_a_from_1850"]) > max(exits["bert_a"])
    bert, late, given = ([np.interp(n, *line.get_data()) for n in range(200, 2900, 100)] for line in past.lines)
    assert all(np.greater(bert, late)) and all(np.greater(given, late))


def test_the_lead_is_that_of_the_rows(drawn):
    found = pictures.leads(pictures.tables())
    assert [len(of_seeds) for of_seeds in found.values()] == [2, 2, 2]
    text = said(DOCS / "evidence" / "longer.md", "lead")
    curves = [curve for of_seeds in found.values() for curve in of_seeds]
    assert (
        f"up to {max(max(gaps) for _, gaps in curves):.1f} bits about update 2,200, less than 0.3 after 10,000" in text
    )
    assert all(updates[int(np.argmax(gaps))] in range(2100, 2301) for updates, gaps in curves)
    assert max(gap for updates, gaps in curves for n, gap in zip(updates, gaps, strict=True) if n >= 10000) < 0.3
    assert sum(len(line.get_xdata()) > 2 for line in drawn["lead"].axes[0].lines) == 3


def test_word_order_along_training_is_that_of_the_rows(drawn):
    found, page = pictures.orders(pictures.tables()), DOCS / "evidence" / "contrasts.md"
    assert {*found} == {*pictures.INK} - {*pictures.MOVED[1:]}
    assert all(xs == [*range(500, 5001, 500)] for xs, _ in found.values())
    drawn_lines = [list(line.get_ydata()) for line in drawn["order"].axes[0].lines[:4]]
    assert drawn_lines == [ys for _, ys in found.values()]
    first, last = ({model: ys[n] for model, (_, ys) in found.items()} for n in (0, -1))
    text = said(page, "order")
    assert (
        "TUPE-R begins at {tupe_r:.0f} % after 500 updates, TUPE-A at {tupe_a:.0f} %, BERT-A at {bert_a:.0f} % and "
        "BERT-R at {bert_r:.0f} %".format(**first)
        in text
    )
    assert f"all end at {min(last.values()):.0f} to {max(last.values()):.0f} %" in text
    plateau = found["bert_a"][1][:3]
    assert f"it prefers {min(plateau):.0f} to {max(plateau):.0f} % of them" in page.read_text(encoding="utf-8")


def test_costs_are_those_of_the_measurement(drawn):
    steps = pictures.steps_of()
    assert [*steps] == ["128 tokens", "512 tokens", "1,024 tokens"]
    (axis,) = drawn["costs"].axes
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert len(names) == len(set(names)) == 31 and {"TUPE-A", "TUPE-A, [CLS] tied", "BERT-A^d", "nopos"} <= {*names}
    longest = {name: float(np.median(ratio)) for name, ratio in steps["1,024 tokens"].items()}
    points = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == plotting.MARKERS[2]]
    assert points == sorted(longest.values())
    assert longest["BERT-A^d"] == pytest.approx(float(cost("BERT-A^d", 1024)), abs=0.01)
    text = said(DOCS / "benchmarks.md", "costs")
    slow = [name for name in names if longest[name] > 1.3]
    assert all(any(word in name for word in ("deberta", "shaw", "transformer_xl", "BERT-A^d")) for name in slow)
    assert f"up to {max(longest.values()):.2f} times at 1,024 tokens" in text
    assert f"FIRE and URPE take {longest['fire']:.2f} times" in text and f"{longest['urpe']:.2f}" in text
    others = [value for name, value in longest.items() if name not in (*slow, "fire", "urpe")]
    assert "within 6 % of 1" in text and max(abs(value - 1) for value in others) < 0.06


def test_the_committed_models_look_where_the_page_says(drawn):
    page = DOCS / "inspect.md"
    peaks = [axis.get_title().partition(": highest at ")[2] for axis in drawn["bias"].axes]
    assert "head 1 has its peak at {}, heads 2 and 4 at {}, head 3 at {}".format(*peaks[:3]) in said(page, "bias")
    assert peaks[3] == peaks[1]
    titles = [axis.get_title().split("\ndeviation ") for axis in drawn["correlations"].axes]
    spread = dict(title for title in titles if len(title) == 2)
    words = " ".join(page.read_text(encoding="utf-8").split())
    largest = spread.pop("position-position")
    assert len(spread) == 4 and max(spread.values()) < largest
    assert f"standard deviation is {largest}, that of the other terms at most {max(spread.values())}" in words


def test_the_command_draws_what_is_named(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", {name: lambda name=name: drawn[name] for name in drawn})
    result = CliRunner().invoke(pictures.command, ["layer", f"--output={tmp_path}"])
    assert result.exit_code == 0 and [path.name for path in tmp_path.iterdir()] == ["layer.png"], result.output
    result = CliRunner().invoke(pictures.command, ["lair", f"--output={tmp_path}"])
    assert result.exit_code == 2 and "'forest'" in result.output


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_what_is_committed_is_what_is_drawn(drawn, name, tmp_path):
    """... as far as sizes tell: other versions of matplotlib draw other pixels."""
    plotting.save(drawn[name], tmp_path / f"{name}.png")
    ours, committed = (Image.open(folder / f"{name}.png") for folder in (tmp_path, pictures.FOLDER))
    assert ours.size == committed.size and ours.size[0] == 720


def test_every_picture_of_the_pages_comes_from_a_command():
    """... is on a page, and as wide as a phone shows it."""
    committed = [*DOCS.rglob("*.png")]
    names = {path.stem for path in committed if path.parent == pictures.FOLDER}
    assert names == {*pictures.PICTURES}
    assert {path.parent for path in committed} == {pictures.FOLDER, pictures.FOLDER / "gallery"}  # lab.gallery
    pages = "".join(path.read_text(encoding="utf-8") for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"))
    for path in committed:
        assert Image.open(path).size[0] == 720 and f"figures/{path.relative_to(pictures.FOLDER)}" in pages
