"""Longer tables of positions: what they hold, what the settings say, and that training continues at the new length."""

import pytest
import torch
from click.testing import CliRunner
from helpers import load, pretrain_arguments, train

from tupe.checkpoints.stretch import command, stretch
from tupe.checkpoints.trained import read_model, unpack_settings
from tupe.evaluate.loading import load_model

OLD, NEW = 24, 46  # every second position of the new table, counted from the first word, is an old one


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """{position: checkpoint after 2 updates on blocks of 24 tokens}."""

    def checkpoint(position):
        folder = tmp_path_factory.mktemp("run")
        options = ["--max-update=2", "--num-workers=0", "--encoder-layers=1", f"--position={position}"]
        train(pretrain_arguments(data, folder, *options, arch="bert_a_tiny"))
        return folder / "checkpoint_last.pt"

    return {position: checkpoint(position) for position in ("absolute", "untied+t5", "alibi")}


def run(*words):
    result = CliRunner().invoke(command, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.mark.parametrize("position, first", [("absolute", 1), ("untied+t5", 2), ("alibi", None)])
def test_stretched_tables(trained, tmp_path, position, first):
    path = tmp_path / "stretched.pt"
    status, output = run(f"--checkpoint={trained[position]}", f"--length={NEW}", f"--output={path}")
    assert status == 0 and f"{OLD} -> {NEW} positions" in output
    old, new = load(trained[position])["model"], load(path)["model"]
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    key = f"encoder.positions.{position.partition('+')[0]}.table.weight"
    assert changed == {"encoder._extra_state"} | ({key} if first else set())
    if first:
        before, after = old[key], new[key]
        assert len(after) == len(before) + NEW - OLD and torch.equal(after[:first], before[:first])
        words = after[first:]
        torch.testing.assert_close(words[::2], before[first:], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(words[1::2], (words[:-1:2] + words[2::2]) / 2, atol=1e-6, rtol=1e-5)
    model, _ = load_model(path)
    assert model.config.max_position_embeddings == NEW
    assert model(torch.randint(5, 40, (2, NEW))).logits.isfinite().all()
    for trained in (read_model(path), stretch(read_model(path), 2 * NEW)):
        assert unpack_settings(trained.weights["encoder._extra_state"])["stretched_from"] == str(OLD)


def test_training_continues_longer(trained, data, tmp_path):
    """What computes any length goes on as it is; a table of positions has to be stretched first."""
    options = ["--max-update=1", "--num-workers=0", "--encoder-layers=1"]
    options += ["--tokens-per-sample=40", "--max-positions=40"]
    stretched = tmp_path / "stretched.pt"
    run(f"--checkpoint={trained['absolute']}", "--length=40", f"--output={stretched}")
    for position, checkpoint in [("alibi", trained["alibi"]), ("absolute", stretched)]:
        more = [*options, f"--finetune-from-model={checkpoint}", f"--position={position}"]
        (losses,) = train(pretrain_arguments(data, tmp_path / position, *more, arch="bert_a_tiny"))
        state = load(tmp_path / position / "checkpoint_last.pt")
        assert losses[0] > 0 and state["cfg"]["model"]["max_positions"] == 40
    assert b"stretched_from=24" in bytes(state["model"]["encoder._extra_state"].tolist())
    with pytest.raises(ValueError, match="40 tokens: absolute of the checkpoint .* has vectors for 24; .*stretch"):
        more = [*options, f"--finetune-from-model={trained['absolute']}", "--position=absolute"]
        train(pretrain_arguments(data, tmp_path / "refused", *more, arch="bert_a_tiny"))


def test_what_cannot_be_stretched(trained, tmp_path):
    model = read_model(trained["absolute"])
    with pytest.raises(ValueError, match="has 24 positions already"):
        stretch(model, 24)
    model.config.position = "nonparametric"
    with pytest.raises(ValueError, match="nonparametric cannot be stretched; valid: absolute, untied, absolute_d"):
        stretch(model, 48)
