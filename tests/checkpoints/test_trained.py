"""A model is one thing, whichever form it has on the disk; no command needs fairseq to read it, or writes into it."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from helpers import PLUGIN, load
from safetensors.torch import load_file, save_file

from tupe.checkpoints.export import export
from tupe.checkpoints.files import as_file, write_model
from tupe.checkpoints.trained import fingerprint, read_model
from tupe.cli import main
from tupe.data.splits import read_symbols
from tupe.evaluate.loading import load_model


@pytest.fixture(scope="module")
def folder(pretrained, vocabulary, tmp_path_factory):
    """The pre-trained model as transformers has it."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    export(pretrained, folder, vocabulary, code=False)
    return folder


def run(*words):
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_the_same_model(folder, pretrained):
    of_file, of_folder = read_model(pretrained), read_model(folder)
    assert of_file.config == of_folder.config
    assert of_file.tensors().keys() == of_folder.tensors().keys()
    (theirs, _), (ours, text) = load_model(pretrained), load_model(folder)
    own = ours.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in theirs.state_dict().items())
    assert text.data == folder.resolve() and of_file.updates == 2


def test_files_and_folders_there_and_back(folder, pretrained, tmp_path):
    """To the bit: file -> folder -> file -> folder."""
    write_model(read_model(folder), tmp_path / "file.pt")
    write_model(read_model(tmp_path / "file.pt"), tmp_path / "again", folder)
    for name in ("model.safetensors", "config.json", "dict.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    one, two = (load(path)["model"] for path in (pretrained, tmp_path / "file.pt"))
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())
    assert torch.equal(one["_extra_state"], fingerprint(read_symbols(folder)))


@pytest.mark.parametrize("model", ["tupe_r_mini", "bert_a_mini"])
def test_the_released_models_come_back_to_the_bit(model, tmp_path):
    source = PLUGIN.parent / "models" / model
    write_model(read_model(source), tmp_path / "file.pt")
    write_model(read_model(tmp_path / "file.pt"), tmp_path / "back", source)
    write_model(read_model(source), tmp_path / "copy", source)
    for folder in ("back", "copy"):
        written = (tmp_path / folder / "model.safetensors").read_bytes()
        assert written == (source / "model.safetensors").read_bytes()


def test_shards_of_transformers_are_one_model(folder, tmp_path):
    copy, weights = shutil.copytree(folder, tmp_path / "sharded"), load_file(folder / "model.safetensors")
    (copy / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in {*places.values()}:
        save_file({name: value for name, value in weights.items() if places[name] == file}, copy / file)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = read_model(copy).tensors()
    assert found.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in found.items())
    (copy / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="model-1.safetensors cannot be read"):
        read_model(copy)


def test_blocks_of_an_export_fit_into_its_model(folder, vocabulary):
    """It has no record that says how long those of pre-training were."""
    model, text = load_model(folder, vocabulary)
    sizes = text.blocks("valid").blocks.sizes
    assert 0 < max(sizes) <= model.config.max_position_embeddings < 512


def test_a_file_is_made_anew_and_the_folder_stays_as_it_is(folder, tmp_path):
    """Whatever file of fairseq a stranger puts into it."""
    copy = shutil.copytree(folder, tmp_path / "checkpoint-70")
    trained = read_model(copy)
    assert trained.updates == 70 and trained.task["data"] == str(copy)
    weights = load_file(copy / "model.safetensors")
    name, value = next(iter(weights.items()))
    (copy / "as_fairseq.pt").write_bytes(b"anything")
    save_file({**weights, name: value + 1}, copy / "model.safetensors", {"format": "pt"})
    before = sorted(copy.iterdir())
    with as_file(copy) as file:
        assert torch.equal(load(file)["model"][name.removeprefix("tupe.")], value + 1)
        assert load(file)["optimizer_history"][-1]["num_updates"] == 70
        assert sorted(copy.iterdir()) == before
    assert not file.exists()


def test_a_file_is_itself(pretrained):
    with as_file(pretrained) as file:
        assert file == pretrained
    assert file.exists()


WITHOUT = """
import sys
sys.modules["fairseq"] = sys.modules["hydra"] = sys.modules["omegaconf"] = None
from click.testing import CliRunner
from tupe.cli import main
for words in {commands!r}:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (words, result.output, result.exception)
"""


def test_no_command_needs_fairseq(pretrained, folder, vocabulary, tmp_path):
    """In a process where it cannot be imported: everything that takes a model, in either form."""
    commands, pairs = [], tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"sentence_good": "a b", "sentence_bad": "b a"}) + "\n")
    for form, path in (("file", pretrained), ("folder", folder)):
        out, model = tmp_path / form, f"--checkpoint={path}"
        commands += [
            ["order", path, "--sentences=4", "--tokens=200", f"--output={out}/order", f"--data={vocabulary}"],
            ["minimal-pairs", path, f"--pairs={pairs}", f"--output={out}/pairs"],
            ["probe", "properties", path, "--words=2"],
            ["plot", "positions", model, f"--output={out}/positions.png"],
            ["checkpoint", "average", path, path, f"--output={out}/mean.pt"],
            ["checkpoint", "strip", path, f"--output={out}/stripped"],
            ["checkpoint", "stretch", model, "--length=40", f"--output={out}/stretched.pt"],
            ["checkpoint", "swap", model, "--position=alibi", f"--output={out}/swapped"],
            ["checkpoint", "export", model, f"--output={out}/exported", f"--data={vocabulary}"],
            ["checkpoint", "convert", "--from", f"{out}/exported", f"--output={out}/converted"],
        ]
    before = {path: path.stat().st_mtime_ns for path in (pretrained.parent, folder, *folder.iterdir())}
    text = textwrap.dedent(WITHOUT).format(commands=[[str(word) for word in words] for words in commands])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for name in ("mean.pt", "stretched.pt", "stripped", "swapped"):
        one, two = (read_model(tmp_path / form / name) for form in ("file", "folder"))
        assert one.config == two.config
        assert all(torch.equal(value, two.weights[key]) for key, value in one.weights.items())
    assert read_model(tmp_path / "file" / "swapped").config.position == "alibi"


def test_both_engines_train_from_it(folder, pretrained, learnable, tmp_path):
    tune = ["finetune", "--task=CoLA", f"--data={learnable}", "--gpus=0", "--allocator=none", "--max-epoch=1"]
    tune += ["--num-workers=0", "--batch-size=12"]
    for source, more in ((folder, []), (pretrained, ["--engine=torch"])):
        run(*tune, *more, "--checkpoint", source, "--output", tmp_path / source.stem)
        record = json.loads((tmp_path / source.stem / "record.json").read_text())
        assert record["state"] == "finished" and record["pretrained"] == str(source.resolve())


def test_other_folders_are_refused_in_one_line(folder, tmp_path):
    words = ["checkpoint", "stretch", "--length=40", "--output", str(tmp_path / "out"), "--checkpoint"]
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(main, [*words, str(tmp_path / "empty")])
    assert result.exit_code == 2 and "it has no config.json" in result.output
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    result = CliRunner().invoke(main, [*words, str(other)])
    assert result.exit_code == 2 and "model_type is 'gpt2', not 'tupe'" in result.output
