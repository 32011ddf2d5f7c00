"""Every figure from checkpoints of a short real training, through their commands."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import build_masked_lm, pretrain_arguments, train, write_data
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lab import figures, plotting
from lab.__main__ import main
from lab.figures import positional_logits
from tupe.run.record import Record


def lab(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> checkpoint after 2 updates; and the data."""
    folder = tmp_path_factory.mktemp("plot")
    data, checkpoints = write_data(folder / "data"), {}
    for arch, position in [("tupe_a", "untied"), ("tupe_r", "untied:layer+t5:layer")]:
        more = ["--max-update=2", "--num-workers=0", f"--position={position}"]
        train(pretrain_arguments(data, folder / arch, *more, arch=f"{arch}_tiny"))
        checkpoints[arch] = folder / arch / "checkpoint_last.pt"
    return checkpoints, data


@pytest.fixture(autouse=True)
def texts_are_whole(monkeypatch):
    """Of every figure that is written here."""

    def save(figure, path, original=plotting.save):
        figure.canvas.draw()
        below = [legend.get_window_extent() for legend in figure.legends]  # the picture grows with them
        page = Bbox.union([figure.bbox, *below]).padded(1)
        ticks = {label for axis in figure.axes for label in (*axis.get_xticklabels(), *axis.get_yticklabels())}
        for text in set(figure.findobj(Text)) - ticks:
            box = text.get_window_extent()
            assert not text.get_text() or page.contains(*box.min) and page.contains(*box.max), text.get_text()
        original(figure, path)

    monkeypatch.setattr(figures, "save", save)


def test_figures_of_checkpoints(runs, tmp_path):
    path = tmp_path / "folder" / "positions.png"
    words = ["--checkpoint", runs[0]["tupe_a"], "--output", path.with_suffix("")]
    result = lab("plot", "positions", *words)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_layer_that_is_named_is_drawn(runs, monkeypatch, tmp_path):
    model, text = figures.load_model(runs[0]["tupe_r"])
    with torch.no_grad():
        model.tupe.encoder.positions["t5"][1].table.weight.fill_(700)
    monkeypatch.setattr(figures, "load_model", lambda *_: (model, text))
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure.axes[0].images[0].get_array()))
    for layer in (1, 2):
        lab("plot", "positions", f"--checkpoint={runs[0]['tupe_r']}", f"--layer={layer}", f"--output={tmp_path}/x")
    assert [values.min() > 500 for values in drawn] == [False, True]
    other = lab("plot", "positions", f"--checkpoint={runs[0]['tupe_r']}", f"--output={tmp_path}/y", "--layer=3")
    assert other.exit_code == 2 and "unknown layer 3; valid, counted from 1: 1 to 2" in other.output


def test_loss_curves_of_runs(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "losses", lambda lines, draw=figures.losses: drawn.update(lines) or draw(lines))
    run = tmp_path / "run"
    entries = [{"num_updates": n, "split": split, "loss": 4.0} for n in (5, 10) for split in ("valid", "valid1")]
    run.mkdir()
    Record("masked_lm", "tupe_r", "", 1, 1e-4, {"max_update": 10}, ["valid", "valid1"], scores=entries).save(run)
    result = lab("plot", "loss", f"A={run}", "--output", tmp_path / "loss")
    assert result.exit_code == 0, result.output
    assert drawn == {"A": ([5, 10], [4.0, 4.0])}
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_positional_logits_are_the_models():
    model = build_masked_lm("tupe_r_tiny", max_positions=16).eval()
    logits = positional_logits(model)
    (terms, *_) = model.tupe.encoder.layer_inputs(16)
    torch.testing.assert_close(logits, terms.prepared.bias)
    assert logits.shape == (2, 16, 16)
    with pytest.raises(ValueError, match="absolute"):
        positional_logits(build_masked_lm("bert_a_tiny"))


def test_positions_are_counted_from_cls():
    """[CLS], which is position 0, is not drawn; the largest logit stands where its query and key are."""
    logits = torch.zeros(1, 8, 8)
    logits[0, 3, 5] = 1.0
    axis, _ = figures.positional(logits).axes
    (image,) = axis.images
    row, column = np.unravel_index(image.get_array().argmax(), image.get_array().shape)
    left, right, bottom, top = image.get_extent()
    assert (column + left + 0.5, row + top + 0.5) == (5, 3) and (right, bottom) == (7.5, 7.5)


def test_no_losses_no_figure(tmp_path):
    (tmp_path / "folder").mkdir()
    entry = {"num_updates": 5, "split": "valid", "loss": 4.0, "accuracy": 70.0}
    finetuned = Record("RTE", "tupe_r", "", 1, 1e-4, {"max_epoch": 1}, ["valid"], scores=[entry], metrics=["accuracy"])
    finetuned.save(tmp_path / "folder")
    result = lab("plot", "loss", tmp_path / "folder", "--output", tmp_path / "none")
    assert result.exit_code == 2 and "valid: the folder of a pre-training" in result.output
    (tmp_path / "folder" / "record.json").unlink()
    result = lab("plot", "loss", tmp_path / "folder", "--output", tmp_path / "none")
    assert result.exit_code == 2 and "no validation losses" in result.output
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["positions", "--checkpoint=missing.pt"], "missing.pt"),
        (["positions", "--checkpoint={tupe_a}", "--length=0"], "--length"),
        (["positions", "--checkpoint={tupe_a}", "--data=/nowhere"], "/nowhere"),
        (["positions", "--checkpoint={tupe_a}", "--length=9999"], "a length of 9999; valid: at most"),
        (["loss", "A={tupe_a}", "A={tupe_r}"], "each its own label"),
    ],
)
def test_what_cannot_be_drawn_is_named(runs, tmp_path, arguments, message):
    result = lab("plot", *(word.format(**runs[0]) for word in arguments), "--output", tmp_path / "x")
    assert result.exit_code == 2 and message in result.output
    assert not list(tmp_path.iterdir())
