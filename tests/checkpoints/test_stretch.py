"""Longer tables of positions: what they hold, and that training continues at the new length."""

import pytest
import torch
from click.testing import CliRunner
from helpers import load, pretrain_arguments, train

from tupe.checkpoints.change import TABLE, stretch, stretch_command
from tupe.checkpoints.trained import read_model

OLD, NEW = 24, 46  # every second position of the new table, counted from the first word, is an old one


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """{position: folder of a run after 2 updates on blocks of 24 tokens}."""

    def run(position):
        folder = tmp_path_factory.mktemp("run")
        options = ["--max-update=2", "--num-workers=0", "--encoder-layers=1", f"--position={position}"]
        train(pretrain_arguments(data, folder, *options, arch="bert_a_tiny"))
        return folder

    return {position: run(position) for position in ("absolute", "untied+t5", "alibi")}


def run(checkpoint, length, output):
    done = CliRunner().invoke(
        stretch_command, [f"--checkpoint={checkpoint}", f"--length={length}", f"--output={output}"]
    )
    assert done.exit_code == 0 and f"{OLD} -> {length} positions" in done.output, done.output


@pytest.mark.parametrize("position, first", [("absolute", 1), ("untied+t5", 2), ("alibi", None)])
def test_stretched_tables(trained, tmp_path, position, first):
    path = tmp_path / "stretched"
    run(trained[position], NEW, path)
    old, new = read_model(trained[position]).weights, read_model(path).weights
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    key = f"encoder.positions.{position.partition('+')[0]}.table.weight"
    assert changed == ({key} if first else set())
    if first:
        before, after = old[key], new[key]
        assert len(after) == len(before) + NEW - OLD and torch.equal(after[:first], before[:first])
        words = after[first:]
        torch.testing.assert_close(words[::2], before[first:], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(words[1::2], (words[:-1:2] + words[2::2]) / 2, atol=1e-6, rtol=1e-5)
    model = read_model(path).model()
    assert model.config.max_position_embeddings == NEW
    assert model(torch.randint(5, 40, (2, NEW))).logits.isfinite().all()


def test_tables_of_encodings_with_any_name_are_found():
    for key in ("encoder.positions.my-abs.table.weight", "encoder.positions.my-abs.1.table.weight"):
        assert TABLE.search(key)[1] == "my-abs"


def test_training_continues_longer(trained, data, tmp_path):
    """What computes any length goes on as it is; a table of positions has to be stretched first."""
    options = ["--max-update=1", "--num-workers=0", "--encoder-layers=1"]
    options += ["--tokens-per-sample=40", "--max-positions=40"]
    run(trained["absolute"], 40, tmp_path / "stretched")
    for position, checkpoint in [("alibi", trained["alibi"]), ("absolute", tmp_path / "stretched")]:
        more = [*options, f"--finetune-from-model={checkpoint}", f"--position={position}"]
        (losses,) = train(pretrain_arguments(data, tmp_path / position, *more, arch="bert_a_tiny"))
        state = load(tmp_path / position / "checkpoint_last.pt")
        assert losses[0] > 0 and state["cfg"]["model"]["max_positions"] == 40
    with pytest.raises(ValueError, match="40 tokens: absolute of the checkpoint .* has vectors for 24; .*stretch"):
        more = [*options, f"--finetune-from-model={trained['absolute']}", "--position=absolute"]
        train(pretrain_arguments(data, tmp_path / "refused", *more, arch="bert_a_tiny"))


def test_what_cannot_be_stretched(trained):
    model = read_model(trained["absolute"])
    with pytest.raises(ValueError, match="has 24 positions already"):
        stretch(model, 24)
    model.config.position = "nonparametric"
    with pytest.raises(ValueError, match="nonparametric cannot be stretched; valid: absolute, untied, absolute_d"):
        stretch(model, 48)
