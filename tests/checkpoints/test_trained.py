"""A model is one thing, whichever form it has on the disk; no command needs fairseq to read it, or writes into it."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from helpers import PLUGIN
from safetensors.torch import load_file

from tupe.checkpoints.export import export
from tupe.checkpoints.trained import fingerprint, read_model
from tupe.cli import main
from tupe.data.splits import read_symbols
from tupe.evaluate.loading import load_model
from tupe.run import record
from tupe.run.record import Record


@pytest.fixture(scope="module")
def folder(pretrained, vocabulary, tmp_path_factory):
    """The pre-trained model as transformers has it."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    export(pretrained, folder, vocabulary, code=False)
    return folder


def test_it_is_the_same_model(folder, pretrained):
    of_file, of_folder = read_model(pretrained), read_model(folder)
    assert of_file.config == of_folder.config and of_file.updates == of_folder.updates == 2
    assert of_file.weights.keys() == of_folder.weights.keys()
    assert all(torch.equal(value, of_folder.weights[name]) for name, value in of_file.weights.items())
    assert torch.equal(of_file.weights["_extra_state"], fingerprint(read_symbols(folder)))
    assert of_file.origin()["pretrained_weights"] == of_folder.origin()["pretrained_weights"]
    _, text = load_model(folder)
    assert text.data == folder.resolve()


@pytest.mark.parametrize("model", ["tupe_r_mini", "bert_a_mini"])
def test_the_released_models_come_back_to_the_bit(model, tmp_path):
    source = PLUGIN.parent / "models" / model
    export(source, tmp_path / "copy", code=False)
    for name in ("model.safetensors", "dict.txt", "sentencepiece.bpe.model"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()


def test_a_finished_run_has_its_model(pretrained, vocabulary):
    """Under the names that the second engine gives it: every reader takes the run's folder, and its text."""
    run = pretrained.parent
    of_file, of_run = read_model(pretrained), read_model(run)
    assert all(torch.equal(value, of_run.weights[name]) for name, value in of_file.weights.items())
    assert of_run.config == of_file.config and of_run.updates == 2
    assert of_run.task["tokens_per_sample"] == 20 and of_run.task["data"] == str(vocabulary)
    assert {"config.json", "model.safetensors", "training.json", "dict.txt"} <= {path.name for path in run.iterdir()}
    assert (run / "dict.txt").read_bytes() == (vocabulary / "dict.txt").read_bytes()


def test_blocks_have_the_length_of_training_where_a_record_leaves_it_out(pretrained, tmp_path):
    """Both engines leave out what is their default; fairseq's is 1,024 tokens, the other's 512."""
    for engine, length in (({}, 1024), ({"engine": "torch"}, None)):
        run = shutil.copytree(pretrained.parent, tmp_path / f"run{length}", ignore=shutil.ignore_patterns("*.pt"))
        about = record.read(run)
        about.config = {**{k: v for k, v in about.config.items() if k != "task.tokens_per_sample"}, **engine}
        about.save(run)
        (run / "checksums.json").unlink(missing_ok=True)
        assert read_model(run).task.get("tokens_per_sample") == length


def test_several_labels_for_a_text_stay_several(small, vocabulary, tmp_path):
    """A head that transformers trained with a sigmoid for each label."""
    from tupe.modeling_tupe import TupeForSequenceClassification

    labels = {"id2label": {0: "x", 1: "y"}, "label2id": {"x": 0, "y": 1}, "problem_type": "multi_label_classification"}
    model = TupeForSequenceClassification.from_pretrained(small, **labels)
    model.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", vocabulary, code=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    again = TupeForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[0, 5, 6, 7, 2]])
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


def test_blocks_of_an_export_fit_into_its_model(folder, vocabulary):
    """It has no record that says how long those of pre-training were."""
    model, text = load_model(folder, vocabulary)
    sizes = text.blocks("valid").blocks.sizes
    assert 0 < max(sizes) <= model.config.max_position_embeddings < 512


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
            ["checkpoint", "average", path, path, f"--output={out}/mean"],
            ["checkpoint", "stretch", model, "--length=40", f"--output={out}/stretched"],
            ["checkpoint", "swap", model, "--position=alibi", f"--output={out}/swapped"],
            ["checkpoint", "export", model, f"--output={out}/exported", f"--data={vocabulary}"],
        ]
    before = {path: path.stat().st_mtime_ns for path in (pretrained.parent, folder, *folder.iterdir())}
    text = textwrap.dedent(WITHOUT).format(commands=[[str(word) for word in words] for words in commands])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for name in ("mean", "stretched", "swapped", "exported"):
        one, two = (tmp_path / form / name / "model.safetensors" for form in ("file", "folder"))
        assert one.read_bytes() == two.read_bytes()
    assert read_model(tmp_path / "file" / "swapped").config.position == "alibi"


def test_both_engines_train_from_it(folder, pretrained, learnable, tmp_path):
    """Whatever file of fairseq a stranger puts into the folder, which stays as it is."""
    tune = ["finetune", "--task=CoLA", f"--data={learnable}", "--gpus=0", "--allocator=none", "--max-epoch=1"]
    tune += ["--num-workers=0", "--batch-size=12"]
    source, found = shutil.copytree(folder, tmp_path / "source"), {}
    (source / "as_fairseq.pt").write_bytes(b"anything")
    before = sorted(source.iterdir())
    for name, path, engine in (("folder", source, "fairseq"), ("file", pretrained, "fairseq"),
                               ("second", pretrained, "torch")):  # fmt: skip
        words = [*tune, "--engine", engine, "--checkpoint", path, "--output", tmp_path / name]
        result = CliRunner().invoke(main, [*map(str, words)])
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / name / "record.json").read_text())
        assert record["state"] == "finished" and record["pretrained"] == str(path.resolve())
        found[name] = record["scores"], record["pretrained_weights"]
    assert found["folder"] == found["file"] and found["second"][1] == found["file"][1]
    assert sorted(source.iterdir()) == before
    best = read_model(tmp_path / "file")  # the fine-tuned model, in the folder of its run
    assert best.heads() == ["sentence_classification_head"] and best.updates > 0


def test_both_engines_pretrain_further_from_it(folder, vocabulary, tmp_path):
    """With equal results: the model is the checkpoint's, what contradicts it is refused."""
    words = ["pretrain", "--recipe=pretrain_further", f"--finetune-from-model={folder}", f"--data={vocabulary}"]
    words += ["--tokens-per-sample=20", "--max-epoch=1", "--batch-size=16", "--lr=1e-3", "--num-workers=0", "--gpus=0"]
    words += ["--dropout=0", "--attention-dropout=0", "--allocator=none"]
    records = {}
    for engine in ("fairseq", "torch"):
        more = [f"--engine={engine}", f"--output={tmp_path / engine}"]
        result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == 0, result.output
        records[engine] = json.loads((tmp_path / engine / "record.json").read_text())
        longer = CliRunner().invoke(main, [*words, f"--engine={engine}", f"--output={tmp_path}/x",
                                           "--tokens-per-sample=21"])  # fmt: skip
        assert longer.exit_code == 2 and "untied of the checkpoint" in longer.output
        other = ["--arch=bert_a_tiny", f"--output={tmp_path / 'x'}", f"--engine={engine}"]
        refused = CliRunner().invoke(main, [*words, *other])
        assert refused.exit_code == 2 and "the checkpoint, absolute here" in refused.output, refused.output
    one, two = (load_file(tmp_path / engine / "model.safetensors") for engine in records)
    start = load_file(folder / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(one["tupe.encoder.tokens.weight"], start["tupe.encoder.tokens.weight"])
    about = [
        {key: value for key, value in records[engine].items() if key.startswith("pretrained")} for engine in records
    ]
    assert about[0] == about[1] and about[0]["pretrained"] == str(folder)


def test_data_that_were_made_again_are_not_those_of_the_model(folder, tmp_path):
    """As many types in another order are other ids: the model's own dictionary counts, not that of its data."""
    run = shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "data").mkdir()
    lines = (run / "dict.txt").read_text().splitlines()
    (tmp_path / "data" / "dict.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    Record("masked_lm", "tupe_r_tiny", data_folder=str(tmp_path / "data"), started_at="today").save(run)
    with pytest.raises(ValueError, match="as many types as the model's dictionary, but other ones"):
        load_model(run)
    _, text = load_model(run, run)
    assert text.symbols == read_symbols(run)


def test_a_folder_in_a_run_has_no_part_in_its_record(folder, tmp_path):
    run, other = tmp_path / "run", shutil.copytree(folder, tmp_path / "run" / "exported")
    last = shutil.copytree(folder, run / "checkpoint-2")
    Record("electra", "electra_a_tiny", config={"task.mask_prob": 0.4}, started_at="today").save(run)
    assert read_model(other).electra == "" and read_model(other).task["mask_prob"] == 0.15
    assert read_model(last).electra == "electra_a_tiny" and read_model(last).task["mask_prob"] == 0.4


def test_a_run_that_has_not_ended_says_which_file_to_give(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"a run that has not ended; give {tmp_path}/checkpoint_last.pt"):
        read_model(tmp_path)
    for updates in (9, 10):  # of the second engine, whose checkpoints have a model each
        (tmp_path / f"checkpoint-{updates}").mkdir()
        (tmp_path / f"checkpoint-{updates}" / "config.json").touch()
    with pytest.raises(ValueError, match=f"a run that has not ended; give {tmp_path}/checkpoint-10$"):
        read_model(tmp_path)


def test_other_folders_are_refused_in_one_line(folder, tmp_path):
    words = ["checkpoint", "stretch", "--length=40", "--output", str(tmp_path / "out"), "--checkpoint"]
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(main, [*words, str(tmp_path / "empty")])
    assert result.exit_code == 2 and "has no config.json" in result.output
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "checksums.json").unlink()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    result = CliRunner().invoke(main, [*words, str(other)])
    assert result.exit_code == 2 and "model_type is 'gpt2', not 'tupe'" in result.output
