"""What heads look at: models whose heads are made to look somewhere, and the sentences of docs/gallery.md."""

import csv

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import build_masked_lm, write_data

from lab import gallery
from lab.__main__ import main
from lab.known import FIRST
from tupe.evaluate.loading import MASKING, HeldOut

FOLDER = FIRST.parent / "figures" / "gallery"


@pytest.fixture
def text(tmp_path):
    return HeldOut(write_data(tmp_path / "data"), [], dict(MASKING))


def model(position):
    """Each head looks at one offset: the first at +1, the second at -2."""
    found = build_masked_lm("bert_a_tiny", position=position, max_positions=12)
    schemes = found.tupe.encoder.positions["clipped"]
    with torch.no_grad():
        for scheme in schemes if isinstance(schemes, torch.nn.ModuleList) else [schemes]:
            scheme.table.weight.zero_()
            middle = len(scheme.table.weight) // 2
            scheme.table.weight[middle + 1, 0] = scheme.table.weight[middle - 2, 1] = 50.0
    return found


def test_shares_are_where_the_heads_look(text):
    heads = gallery.heads_of(model("clipped"), text, sequences=6, batch=4)
    assert [(one.layer, one.head) for one in heads] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    after, before = (
        {name: float(value) for name, value in one.row("x").items() if name != "model"} for one in heads[:2]
    )
    assert after["next"] == pytest.approx(1, abs=1e-3) and after["near"] > 0.99
    assert after["previous"] == pytest.approx(1 / 12 / 10, abs=1e-3)  # of the last token, which has no next one
    assert before["previous"] < 1e-3 and before["near"] > 0.99
    assert before["cls"] == pytest.approx(
        (1 + 1 / 12) / 11, abs=0.02
    )  # of the third token, and a twelfth of the second
    assert after["entropy"] == pytest.approx(np.log2(12) / 11, abs=0.05)
    assert (after["lowest"], after["highest"]) == (0, 50)
    assert heads[0].weights.sum(1) == pytest.approx(np.ones(12))


def test_words_name_the_large_shares():
    weights = np.zeros((8, 8))
    weights[:, 0], weights[:, 1:] = 0.6, 0.05
    weights[np.arange(1, 7), np.arange(2, 8)] = 0.35
    assert gallery.words_of(gallery.Head(1, 1, weights, 1.0, None)) == "60 % [CLS]\n35 % next"
    assert gallery.words_of(gallery.Head(1, 1, np.full((8, 8), 0.05), 1.0, None)) == "spread"


@pytest.mark.parametrize(
    ("position", "titles"),
    [
        ("clipped", ["all layers, head 1", "all layers, head 2"]),
        ("clipped:layer", [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2)]),
    ],
)
def test_logits_that_layers_share_are_drawn_once(text, position, titles):
    found = model(position)
    if position == "clipped:layer":
        with torch.no_grad():
            found.tupe.encoder.positions["clipped"][1].table.weight *= 2
    heads = gallery.heads_of(found, text, sequences=2)
    figure = gallery.portrait(heads, tokens=5)
    maps = [axis for axis in figure.axes if axis.get_visible() and axis.images]
    assert [axis.get_title() for axis in maps[:4]] == [
        f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2)
    ]
    assert [axis.get_title() for axis in maps[4:]] == titles
    assert maps[0].images[0].get_array().shape == (5, 5)
    assert maps[0].get_xlabel() == "100 % next" and maps[4].get_xlabel() == "logits\n0.0 to 50.0"
    gallery.plt.close(figure)


def test_a_model_without_such_logits_has_its_weights_alone(text):
    heads = gallery.heads_of(build_masked_lm("bert_a_tiny", position="rope", max_positions=12), text, sequences=2)
    assert all(one.logits is None for one in heads) and gallery.position_logits(heads) == {}
    assert {"lowest", "highest"} & heads[0].row("x").keys() == set()


def test_the_command_writes_pictures_and_a_table(small, vocabulary, tmp_path):
    words = [f"a={small}", f"b={small}", f"--data={vocabulary}", "--sequences=2", f"--output={tmp_path / 'new'}"]
    result = CliRunner().invoke(main, ["gallery", *words])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"a.png", "b.png", "heads.csv"}
    rows = list(csv.DictReader((tmp_path / "new" / "heads.csv").open()))
    assert [(row["model"], row["layer"], row["head"]) for row in rows] == [
        (name, str(layer), str(head)) for name in "ab" for layer in (1, 2) for head in (1, 2)
    ]
    refused = CliRunner().invoke(main, ["gallery", str(small), f"--data={vocabulary}", f"--output={tmp_path / 'no'}"])
    assert refused.exit_code == 2 and "give NAME=CHECKPOINT" in refused.output and not (tmp_path / "no").exists()


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def heads():
    """{(model, layer, head): its row} of the committed table."""
    rows = csv.DictReader((FOLDER / "heads.csv").open(encoding="utf-8"))
    return {(row["model"], int(row["layer"]), int(row["head"])): row for row in rows}


def test_the_page_says_what_the_table_does(heads):
    page = " ".join((FIRST.parent / "gallery.md").read_text(encoding="utf-8").split())

    def of(model, layer, head, name, digits=0):
        return f"{100 * float(heads[model, layer, head][name]):.{digits}f} %"

    shares = [float(heads["nopos", 1, head][name]) for head in (1, 2) for name in ("previous", "next")]
    assert f"the next word get {100 * min(shares):.1f} to {100 * max(shares):.1f} % each" in page
    sayings = [
        "gives {} to [CLS]".format(of("nopos", 2, 2, "cls")),
        "one head gives {} to the previous word, the other {} to the next".format(
            of("absolute", 1, 1, "previous"), of("absolute", 1, 2, "next")
        ),
        "{} to the previous word, {} to the next and {} to the word itself".format(
            *(of("sinusoidal", 2, 2, name, 1) for name in ("previous", "next")), of("sinusoidal", 2, 2, "itself")
        ),
        "in the first layer, head 2 {} to the previous one".format(of("tupe_a", 1, 2, "previous")),
        "there {} and {} of the weight go to [CLS]".format(*(of("tupe_a", 2, head, "cls") for head in (1, 2))),
        "below reach {}".format(heads["tupe_a", 1, 1]["highest"]),
        "{} on the next word and {} on the previous one".format(
            of("tupe_r", 1, 1, "next"), of("tupe_r", 1, 2, "previous")
        ),
        "[CLS] takes {} and {} in the second".format(*(of("tupe_r", 2, head, "cls") for head in (1, 2))),
        "with {} and {} on the previous word".format(*(of("t5", layer, 1, "previous") for layer in (1, 2))),
        "with {} and {} on the next".format(*(of("t5", layer, 2, "next") for layer in (1, 2))),
        "reach only {}".format(heads["t5", 1, 1]["highest"]),
        "down to {} in head 1, and to {} in head 2".format(*(heads["alibi", 1, head]["lowest"] for head in (1, 2))),
        "head 1 gives {} to each neighbour".format(of("alibi", 1, 1, "next", 1)),
        "gives {} to the next word. In the second layer".format(of("shaw", 1, 1, "next")),
        "({} on the previous word)".format(of("shaw", 2, 1, "previous")),
        "({} on the next)".format(of("shaw", 2, 2, "next")),
        "with {} and {} on the previous word. In the second, one gives {}".format(
            *(of("deberta", 1, head, "previous") for head in (1, 2)), of("deberta", 2, 1, "next")
        ),
        "both sides, with {} and {}".format(*(of("deberta", 2, 2, name) for name in ("previous", "next"))),
        "one head gives {} to the next word and the other {} to the previous one".format(
            of("rope", 2, 1, "next"), of("rope", 2, 2, "previous")
        ),
    ]  # fmt: skip
    assert [saying for saying in sayings if saying not in page] == []
    assert float(heads["tupe_a", 1, 1]["next"]) > 0.99
    assert of("alibi", 1, 1, "previous", 1) == of("alibi", 1, 1, "next", 1)
    counted = ("previous", "next", "itself", "cls")
    assert max(float(row[name]) for key, row in heads.items() if key[0] == "alibi" for name in counted) < 0.1
    assert 0.095 < max(float(heads["rope", 1, head][name]) for head in (1, 2) for name in counted) < 0.105


def test_models_without_heads_for_neighbours_have_the_highest_losses(heads):
    """What the page says that the ten have in common."""
    models = {name for name, _, _ in heads}
    large = {
        (name, side) for (name, *_), row in heads.items() for side in ("previous", "next") if float(row[side]) >= 0.2
    }
    both = {name for name in models if {(name, "previous"), (name, "next")} <= large}
    assert len(models) == 10 and models - both == {"nopos", "alibi", "sinusoidal"}
    rows = csv.DictReader((FIRST / "discovery" / "runs.csv").open(encoding="utf-8"))
    losses = {row["encoding"]: float(row["loss"]) for row in rows if (row["rate"], row["seed"]) == ("0.001", "1")}
    assert {*sorted(models, key=losses.get)[-3:]} == models - both


def test_every_model_has_its_picture(heads):
    page = (FIRST.parent / "gallery.md").read_text(encoding="utf-8")
    files = {path.stem for path in FOLDER.glob("*.png")}
    assert files == {name for name, _, _ in heads} and all(f"figures/gallery/{name}.png" in page for name in files)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
