"""Folders of transformers where a checkpoint's file is read."""

import json
import os
import shutil

import pytest
import torch
from click.testing import CliRunner
from helpers import load
from safetensors.torch import load_file, save_file

from tupe.checkpoints.convert import convert
from tupe.checkpoints.export import export
from tupe.checkpoints.folders import CONVERTED, as_file
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


def test_it_is_converted_once_and_anew_for_another_model(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "checkpoint-70")
    (copy / CONVERTED).unlink(missing_ok=True)
    file = as_file(copy)
    first = file.stat().st_mtime_ns
    assert as_file(copy) == file == copy / CONVERTED and file.stat().st_mtime_ns == first
    assert load(file)["optimizer_history"][-1]["num_updates"] == 70 and load(file)["last_optimizer_state"] is None
    weights = load_file(copy / "model.safetensors")
    name, value = next(iter(weights.items()))
    save_file({**weights, name: value + 1}, copy / "model.safetensors", {"format": "pt"})
    os.utime(copy / "model.safetensors", ns=(first - 10**9, first - 10**9))  # as `cp -p` and `rsync -a` leave it
    assert torch.equal(load(as_file(copy))["model"][name.removeprefix("tupe.")], value + 1)
    moved = copy.rename(tmp_path / "checkpoint-80")
    state = load(as_file(moved))
    assert state["cfg"]["task"]["data"] == str(moved) and state["optimizer_history"][-1]["num_updates"] == 80
    (moved / CONVERTED).write_bytes((moved / CONVERTED).read_bytes()[:1000])  # a copy that was cut off
    assert load(as_file(moved))["cfg"] == state["cfg"]


def test_a_file_is_itself(pretrained):
    assert as_file(pretrained) == pretrained


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
    assert record["state"] == "finished" and record["pretrained"].endswith(CONVERTED)


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
