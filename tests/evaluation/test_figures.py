"""Every figure and the probe table from checkpoints of a short real training, through the scripts' own entry points."""

import runpy

import numpy as np
import pytest
import torch
from helpers import PLUGIN, build, pretrain_arguments, train, write_data

from tupe.evaluation import figures
from tupe.evaluation.probes import load_model, text_block

SCRIPTS = PLUGIN.parent / "scripts"
plot = runpy.run_path(str(SCRIPTS / "plot.py"))["main"]
probe = runpy.run_path(str(SCRIPTS / "probe.py"))["main"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> checkpoint after 2 updates; and the data."""
    folder = tmp_path_factory.mktemp("plot")
    data, found = write_data(folder / "data"), {}
    for arch, position in [("bert_r", "absolute+t5"), ("tupe_a", "untied"), ("bert_a", "sinusoidal_learned")]:
        more = ["--max-update=2", "--num-workers=0", f"--position={position}"]
        train(pretrain_arguments(data, folder / arch, *more, arch=f"{arch}_tiny"))
        found[arch] = str(folder / arch / "checkpoint_last.pt")
    return found, data


@pytest.mark.parametrize(
    ("figure", "sources"),
    [
        ("correlations", ["{bert_a}"]),
        ("positions", ["{tupe_a}"]),
        ("t5", ["{bert_r}"]),
        ("attention", ["T5={bert_r}", "TUPE-A={tupe_a}"]),
        ("tsne", ["{tupe_a}"]),
        ("phi", ["{bert_a}"]),
    ],
)
def test_figures_of_checkpoints(runs, tmp_path, figure, sources):
    options = ["--out", str(tmp_path / "folder" / figure), "--title", "a title", "--words", "3"]
    plot([figure, *(source.format(**runs[0]) for source in sources), *options])
    assert (tmp_path / "folder" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "folder" / f"{figure}.svg").read_text()
    assert "<svg" in svg


def test_loss_curves(tmp_path):
    log = tmp_path / "a.log"
    log.write_text('x | INFO | valid | {"valid_loss": "3.5", "valid_num_updates": "10"}\n')
    plot(["loss", f"A={log}", f"B={log}", "--out", str(tmp_path / "loss")])
    assert (tmp_path / "loss.svg").stat().st_size > 1000
    log.write_text("nothing here\n")
    with pytest.raises(SystemExit):
        plot(["loss", str(log), "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t5", "{tupe_a}"], "has no 't5'"),
        (["correlations", "{tupe_a}"], "absolute ones only"),
        (["phi", "{bert_r}"], "no learned frequencies"),
        (["positions", "{tupe_a}", "{tupe_a}"], "one checkpoint, not 2"),
        (["positions", "missing.pt"], "missing.pt"),
        (["positions", "{tupe_a}", "--data", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_said(runs, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        plot([word.format(**runs[0]) for word in arguments] + ["--out", str(tmp_path / "x")])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_probe_table(runs, tmp_path, capsys):
    found, _ = runs
    probe([f"R={found['bert_r']}", f"A={found['tupe_a']}", "--words", "3", "--save", str(tmp_path / "a.npz")])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "| | R | A |" and len(lines) == 8
    assert all(len(line.split("|")) == 5 for line in lines)
    saved = np.load(tmp_path / "a.npz")
    assert saved["R"].shape == (24, 24) and not np.allclose(saved["R"], saved["A"])
    first = float(lines[2].split("|")[2])
    assert 0 <= first <= 1


def test_text_block(runs):
    found, data = runs
    _, task = load_model(found["bert_r"])
    tokens = text_block(task, 24)
    assert len(tokens) == 24 and tokens[0] == task.source_dictionary.bos()
    assert torch.equal(text_block(task, 10), tokens[:10])
    with pytest.raises(ValueError, match="no test split"):
        text_block(task, 24, split="test")


def test_figures_are_reproducible(tmp_path):
    logits = build("tupe_a_tiny", max_positions=8).encoder.positions.terms(8)[0][0].detach()
    for name in ("a", "b"):
        figures.save(figures.positional(logits), tmp_path / name)
    for suffix in ("png", "svg"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_figures_are_readable_in_grey():
    """Brightness rises all along the colour map; lines differ without their colours."""
    brightness = figures.plt.get_cmap(figures.HEAT)(np.linspace(0, 1, 32))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(brightness) > 0).all()
    styles = [figures.style(index) for index in range(12)]
    assert len({(style["linestyle"], style["marker"]) for style in styles}) == len(styles)
