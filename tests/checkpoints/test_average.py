"""The mean of checkpoints' weights; and what all commands that change a model refuse."""

import json

import pytest
import torch
from click.testing import CliRunner
from helpers import our_checkpoint

from tupe.checkpoints.change import average
from tupe.checkpoints.trained import read_model
from tupe.cli import main


def run(*words):
    return CliRunner().invoke(main, ["checkpoint", *map(str, words)])


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny checkpoint after 3 updates, whose weights are 1, beside its dictionary."""
    (tmp_path / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(7)))
    return our_checkpoint(tmp_path / "a.pt", 1.0, 3)


def test_average(checkpoint, tmp_path):
    for number, value in enumerate([100.0, 1.0, 2.0, 6.0]):
        our_checkpoint(tmp_path / f"checkpoint_1_{number + 8}.pt", value, number + 8)
    last = [tmp_path / f"checkpoint_1_{number}.pt" for number in (9, 10, 11)]
    done = run("average", *last, "--output", tmp_path / "mean")
    assert done.exit_code == 0, done.output
    mean = read_model(tmp_path / "mean")
    floats = [value for value in mean.weights.values() if value.is_floating_point()]
    assert floats and all(value.eq(3).all() for value in floats) and mean.updates == 11
    assert "11, mean of 3 checkpoints" in (tmp_path / "mean" / "README.md").read_text()
    other = our_checkpoint(tmp_path / "other.pt", 1.0, 1, types=13)
    with pytest.raises(ValueError, match=r"another model .* encoder\.tokens\.weight"):
        average([checkpoint, other])


def test_models_of_other_settings_or_dictionaries_have_no_mean(checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    model = {key: value for key, value in state["model"].items() if key != "encoder._extra_state"}
    settings = {**state["cfg"], "model": {**state["cfg"]["model"], "cls": "tied"}}
    dictionary = {**model, "_extra_state": model["_extra_state"] + 1}
    for said, other in (("settings", {"cfg": settings, "model": model}), ("dictionary", {"model": dictionary})):
        torch.save({**state, **other}, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=f"other.pt has .*other {said}|other.pt has another {said}"):
            average([checkpoint, tmp_path / "other.pt"])


COMMANDS = {
    "average": ["{path}", "{path}"], "stretch": ["--checkpoint={path}", "--length=9"],
    "swap": ["--checkpoint={path}", "--position=t5"], "export": ["--checkpoint={path}"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_written(name, checkpoint, tmp_path):
    """Over another model, of weights that are not finite, without the dictionary or with another
    one, and of another model of fairseq's."""

    def refused(output, *more):
        words = [word.format(path=checkpoint) for word in COMMANDS[name]]
        done = run(name, *words, "--output", tmp_path / output, *more)
        assert done.exit_code == 2 and done.output.count("\n") == 1, done.output
        return done.output

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    assert "has a config.json already" in refused("there")
    assert "nowhere has no dict.txt" in refused("out", "--data", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dict.txt").write_text("a 1\n")
    assert "dict.txt makes 6 types, the model has 12" in refused("out", "--data", tmp_path / "other")
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["encoder.tokens.weight"][3] = float("nan")
    torch.save(state, checkpoint)
    assert "NaN or infinite, in tupe.encoder.tokens.weight" in refused("out")
    roberta = {"cfg": {"model": {"_name": "roberta"}, "task": {}}, "model": {"encoder.weight": torch.ones(1)}}
    torch.save(roberta, checkpoint)
    assert "a.pt is no checkpoint of this project" in refused("out")
    assert not (tmp_path / "out").exists() and json.loads((tmp_path / "there" / "config.json").read_text()) == {}
