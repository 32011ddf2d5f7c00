"""Folders of transformers where a checkpoint's file is read."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from helpers import load
from safetensors.torch import load_file, save_file
from tupe.checkpoints.folders import as_file, contents_of

from tupe.checkpoints.convert import convert
from tupe.checkpoints.export import export
from tupe.cli import main
from tupe.evaluation.loading import load_model


@pytest.fixture(scope="module")
def folder(pretrained, vocabulary, tmp_path_factory):
    """What both engines write: the pre-trained model as transformers has it."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    export(pretrained, folder, vocabulary, code=False)
    return folder


def run(*words):
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_the_same_model(folder, pretrained):
    (theirs, _), (ours, task) = load_model(pretrained), load_model(folder)
    own = ours.state_dict()
    weights = {name: value for name, value in theirs.state_dict().items() if not name.endswith("_extra_state")}
    assert own.keys() >= weights.keys() and all(torch.equal(value, own[name]) for name, value in weights.items())
    assert task.cfg.data == str(folder.resolve())


def test_blocks_of_an_export_fit_into_its_model(folder, vocabulary):
    """It has no record that says how long those of pre-training were."""
    model, task = load_model(folder, vocabulary)
    task.load_dataset("valid")
    assert 0 < max(task.dataset("valid").sizes) <= model.max_positions() < 512


def test_a_file_is_made_anew_and_the_folder_stays_as_it_is(folder, tmp_path):
    """Whatever file of fairseq a stranger puts into it."""
    copy = shutil.copytree(folder, tmp_path / "checkpoint-70")
    state = contents_of(copy)
    assert state["optimizer_history"][-1]["num_updates"] == 70 and state["last_optimizer_state"] is None
    assert state["cfg"]["task"]["data"] == str(copy)
    weights = load_file(copy / "model.safetensors")
    name, value = next(iter(weights.items()))
    (copy / "as_fairseq.pt").write_bytes(b"anything")
    save_file({**weights, name: value + 1}, copy / "model.safetensors", {"format": "pt"})
    before = sorted(copy.iterdir())
    with as_file(copy) as file:
        assert torch.equal(load(file)["model"][name.removeprefix("tupe.")], value + 1)
        assert sorted(copy.iterdir()) == before
    assert not file.exists()


def test_a_file_is_itself(pretrained):
    with as_file(pretrained) as file:
        assert file == pretrained
    assert file.exists()


def test_commands_read_it(folder, pretrained, learnable, tmp_path):
    """As they read the file that it was exported from."""
    for command, name in (("stretch", "--length=40"), ("swap", "--position=t5")):
        for source in (folder, pretrained):
            run("checkpoint", command, "--checkpoint", source, name, "--output", tmp_path / f"{command}{source.suffix}")
        one, two = (load(tmp_path / f"{command}{source.suffix}")["model"] for source in (folder, pretrained))
        assert one.keys() == two.keys()
    tune = ["finetune", "--task=CoLA", f"--data={learnable}", "--gpus=0", "--allocator=none", "--max-epoch=1"]
    tune += ["--num-workers=0", "--batch-size=12"]
    run(*tune, "--checkpoint", folder, "--output", tmp_path / "tuned")
    record = json.loads((tmp_path / "tuned" / "record.json").read_text())
    assert record["state"] == "finished" and record["pretrained"] == str(folder.resolve())


def test_both_ways(folder, pretrained, tmp_path):
    there = convert(folder, "tupe", None, tmp_path / "file")
    export(there, tmp_path / "again", folder, code=False)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert load(there)["last_optimizer_state"] is None


def test_other_folders_are_refused_in_one_line(folder, tmp_path):
    words = ["checkpoint", "stretch", "--length=40", "--output", str(tmp_path / "out"), "--checkpoint"]
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(main, [*words, str(tmp_path / "empty")])
    assert result.exit_code == 2 and "it has no config.json" in result.output
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    result = CliRunner().invoke(main, [*words, str(other)])
    assert result.exit_code == 2 and "model_type is 'gpt2', not 'tupe'" in result.output
    result = CliRunner().invoke(main, ["checkpoint", "export", "--checkpoint", str(folder), "--output", str(tmp_path)])
    assert result.exit_code == 2 and "is a Hugging Face folder already" in result.output
