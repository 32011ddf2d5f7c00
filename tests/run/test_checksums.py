"""Flipped bits and cut ends of every kind of file that is written: no reader takes them for what was written."""

import json
import os
import random
import shutil

import pytest
import torch
from click.testing import CliRunner
from helpers import official_folder, prepare_glue

import tupe
from tupe.checkpoints.export import export
from tupe.checkpoints.gate import read_checkpoint
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.common.prepared import text_encoder
from tupe.data.glue import check_glue, read_targets
from tupe.data.splits import Split, read_symbols
from tupe.run import checksums, record
from tupe.run.folder import fingerprint, write_atomically
from tupe.train.saved import newest_whole

DATA = ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx", "sentencepiece.bpe.model")


@pytest.fixture(scope="module")
def folders(vocabulary, pretrained, small, tmp_path_factory):
    """{name: folder} as this package writes them: prepared text, a task, runs of both engines, an export."""
    place = tmp_path_factory.mktemp("written")
    checksums.seal(shutil.copytree(vocabulary, place / "data"), DATA)
    prepare_glue(official_folder(place / "glue"), vocabulary, place / "glue-bin", ["RTE"])
    shutil.copytree(pretrained.parent, place / "fairseq")
    shutil.copytree(small, place / "torch")
    export(small, place / "export", vocabulary)
    return place


# {file: what reads it, of its folder}; every file that numbers depend on
READERS = {
    "data/dict.txt": read_symbols,
    "data/train.bin": lambda folder: Split(folder / "train"),
    "data/train.idx": lambda folder: Split(folder / "train"),
    "data/sentencepiece.bpe.model": text_encoder,
    "glue-bin/sentencepiece.bpe.model": text_encoder,
    "glue-bin/RTE/input0/train.bin": lambda folder: check_glue(folder.parent, "train"),
    "glue-bin/RTE/input1/valid.idx": lambda folder: check_glue(folder.parent, "valid"),
    "glue-bin/RTE/label/dict.txt": lambda folder: check_glue(folder.parent, "train"),
    "glue-bin/RTE/label/train.bin": lambda folder: read_targets(folder.parent, "train"),
    "glue-bin/RTE/manifest.json": lambda folder: check_glue(folder, "train"),
    "fairseq/checkpoint_last.pt": lambda folder: read_checkpoint(folder / "checkpoint_last.pt"),
    "fairseq/model.safetensors": read_model,
    "fairseq/record.json": record.read,
    "torch/config.json": read_model,
    "torch/model.safetensors": read_model,
    "torch/training.json": record.updates_of,
    "torch/record.json": record.read,
    "torch/checkpoint-4/model.safetensors": lambda folder: newest_whole(folder.parent),
    "torch/checkpoint-4/optimizer.pt": lambda folder: newest_whole(folder.parent),
    "torch/checkpoint-4/training.json": lambda folder: newest_whole(folder.parent),
    "export/config.json": read_model,
    "export/model.safetensors": read_model,
    "export/checksums.json": read_model,
}


def damage(path, chance, cut):
    """Flip a bit, or cut the end off; returns what was there."""
    content = path.read_bytes()
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    os.unlink(path)  # the model of a run is a link to that of its checkpoint
    path.write_bytes(content[: chance.randrange(len(content) - 1)] if cut else changed)
    return content


def silent(name, folders, times):
    """How many of these damages of a file its reader did not notice."""
    path, chance, missed = folders / name, random.Random(name), 0
    READERS[name](path.parent)
    for number in range(times):
        before = damage(path, chance, cut=number % 3 == 2)
        checksums._checked.clear()  # as in another process
        try:
            READERS[name](path.parent)
            missed += 1
        except ValueError as error:
            assert path.name in str(error) and "\n" not in str(error)
        finally:
            write_atomically(path, before)
    READERS[name](path.parent)
    return missed


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_and_a_cut_end_are_noticed(name, folders):
    assert silent(name, folders, 3) == 0


@pytest.mark.thorough
def test_of_four_hundred_damages_none_is_silent(folders):
    assert {name: silent(name, folders, 18) for name in READERS} == dict.fromkeys(READERS, 0)


COMMANDS = {  # words -> files that they read
    "order {torch} --data {data} --sentences 2 --tokens 20 --output {out}": (
        "torch/model.safetensors", "data/valid.bin",
    ),
    "order {fairseq}/checkpoint_last.pt --sentences 2 --tokens 20 --output {out}": ("fairseq/checkpoint_last.pt",),
    "checkpoint export --checkpoint {torch} --data {data} --output {out}": ("torch/config.json", "data/dict.txt"),
    "pretrain --engine torch --data {data} --output {out} --arch tupe_r_tiny --max-update 1 --gpus 0": (
        "data/train.bin", "data/train.idx", "data/dict.txt",
    ),
    "pretrain --data {data} --output {out} --arch tupe_r_tiny --max-update 1 --gpus 0": (
        "data/train.bin", "data/train.idx", "data/dict.txt",
    ),
    "finetune --engine torch --task RTE --data {glue-bin} --checkpoint {torch} --output {out} --gpus 0": (
        "glue-bin/RTE/input0/train.bin", "torch/model.safetensors",
    ),
    "finetune --task RTE --data {glue-bin} --checkpoint {fairseq} --output {out} --gpus 0": (
        "glue-bin/RTE/label/valid.idx", "fairseq/model.safetensors",
    ),
    "prepare glue --glue {glue} --data {data} --output {out}": ("data/sentencepiece.bpe.model",),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "name"), [(words, name) for words, names in COMMANDS.items() for name in names])
def test_a_command_says_which_file_is_damaged(words, name, folders, tmp_path):
    places = {path.name: path for path in folders.iterdir()} | {"out": tmp_path / "out"}
    words = [word.format_map(places) for word in words.split()]
    before = damage(folders / name, random.Random(name), cut=False)
    try:
        result = CliRunner().invoke(main, words)
    finally:
        write_atomically(folders / name, before)
    said = result.output.strip().splitlines()
    assert result.exit_code == 2 and str(folders / name) in said[-1] and "damaged" in said[-1], result.output


def test_verify_reads_everything_and_names_what_is_damaged(folders, tmp_path):
    run = shutil.copytree(folders / "torch", tmp_path / "run")
    whole = CliRunner().invoke(main, ["verify", str(run), str(folders / "fairseq")])
    assert whole.exit_code == 0 and len(whole.output.splitlines()) == 2, whole.output
    damage(run / "checkpoint-4" / "optimizer.pt", random.Random(1), cut=False)
    (run / "config.json").unlink()
    result = CliRunner().invoke(main, ["verify", str(run)])
    assert result.exit_code == 2 and "2 damaged files" in result.output
    assert f"{run / 'config.json'}: missing" in result.output
    assert f"{run / 'checkpoint-4' / 'optimizer.pt'}: its content is not what was written" in result.output


@pytest.mark.parametrize("left", [0.5, 1, 0])
def test_verify_names_a_checkpoint_that_was_cut(left, folders, tmp_path):
    """Of fairseq's, whose checksums are in it. left: of its bytes, as a share; 1: all but the last."""
    run = shutil.copytree(folders / "fairseq", tmp_path / "run")
    content = (run / "checkpoint_last.pt").read_bytes()
    (run / "checkpoint_last.pt").write_bytes(content[: min(int(left * len(content)), len(content) - 1)])
    result = CliRunner().invoke(main, ["verify", str(run)])
    assert result.exit_code == 2 and str(run / "checkpoint_last.pt") in result.output, result.output


def test_a_change_of_ones_own_is_accepted(folders, tmp_path):
    copy = shutil.copytree(folders / "export", tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-6}))
    with pytest.raises(ValueError, match=f"tupe verify --accept {copy}"):
        read_model(copy)
    assert CliRunner().invoke(main, ["verify", "--accept", str(copy)]).exit_code == 0
    assert read_model(copy).config.layer_norm_eps == 1e-6


def test_checksums_stay_until_the_new_ones_are_written(folders, tmp_path, monkeypatch):
    copy = shutil.copytree(folders / "export", tmp_path / "copy")
    before = (copy / "checksums.json").read_bytes()

    def interrupted(path, progress=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(checksums, "sha256", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checksums.accept_all(copy, "")
    assert (copy / "checksums.json").read_bytes() == before


def test_a_changed_record_is_accepted(folders, tmp_path):
    run = shutil.copytree(folders / "torch", tmp_path / "run")
    (run / "record.json").write_text((run / "record.json").read_text().replace('"seed": ', '"seed": 1'))
    assert CliRunner().invoke(main, ["verify", str(run)]).exit_code == 2
    assert CliRunner().invoke(main, ["verify", "--accept", str(run)]).exit_code == 0
    changed, before = (json.loads((folder / "record.json").read_text()) for folder in (run, folders / "torch"))
    assert changed["seed"] == int(f"1{before['seed']}") and changed["checksum"] != before["checksum"]


def test_what_a_run_still_writes_is_not_accepted_as_it_is(folders, tmp_path):
    run = shutil.copytree(folders / "torch", tmp_path / "run")
    (run / "config.json").write_text((run / "config.json").read_text() + " ")
    assert CliRunner().invoke(main, ["verify", "--accept", str(run)]).exit_code == 0
    with (run / "train.log").open("a") as log:
        log.write("the next start\n")
    shutil.rmtree(run / "checkpoint-4")
    whole = CliRunner().invoke(main, ["verify", str(run)])
    assert whole.exit_code == 0, whole.output


def test_checkpoints_that_a_run_writes_anew_are_not_sealed(folders, tmp_path):
    run = shutil.copytree(folders / "fairseq", tmp_path / "run")
    (run / "config.json").write_text((run / "config.json").read_text() + " ")
    assert CliRunner().invoke(main, ["verify", "--accept", str(run)]).exit_code == 0
    state = torch.load(run / "checkpoint_last.pt", weights_only=False)
    torch.save({**state, "extra_state": {**state["extra_state"], "more": "x" * 1000}}, run / "checkpoint_last.pt")
    read_checkpoint(run / "checkpoint_last.pt")
    assert CliRunner().invoke(main, ["verify", str(run)]).exit_code == 0


def test_a_folder_says_what_made_it_and_from_what(folders, small, vocabulary):
    made = checksums.read_signed(folders / "export" / "checksums.json")
    assert made["version"] == tupe.__version__ and made["command"]
    assert set(made["read"]) == {small.name, vocabulary.name} and str(small) not in json.dumps(made)  # names no person
    task = checksums.read_signed(folders / "glue-bin" / "RTE" / "checksums.json")
    assert task["read"] == {"dict.txt": fingerprint([vocabulary / "dict.txt"])}


def test_a_model_that_is_saved_over_another_is_none_that_is_damaged(folders, tmp_path):
    """By transformers, which knows no checksums: those that were there leave."""
    copy = shutil.copytree(folders / "export", tmp_path / "copy")
    model = read_model(copy).model()
    with torch.no_grad():
        model.lm_head.bias += 1
    model.save_pretrained(copy)
    assert read_model(copy).weights["lm_head.bias"].mean() > 0.5


def test_a_large_file_is_read_as_a_whole_once_on_a_machine(tmp_path, monkeypatch):
    """Later starts look at some blocks; a flip between them is found when the file has another time."""
    monkeypatch.setattr(checksums, "CACHE", tmp_path / "cache")
    file, read = tmp_path / "data" / "train.bin", []
    file.parent.mkdir()
    file.write_bytes(os.urandom(checksums.SAMPLES * checksums.SAMPLE + 2**21))
    checksums.seal(file.parent, [file.name])
    monkeypatch.setattr(checksums, "sha256", lambda path, once=checksums.sha256: read.append(path) or once(path))
    for _ in range(2):
        checksums._checked.clear()  # as in another process
        checksums.check(file)
    assert read == [file]
    content = bytearray(file.read_bytes())
    content[checksums.SAMPLE + 100] ^= 1  # between the first two blocks that are looked at
    file.write_bytes(content)
    with pytest.raises(ValueError, match="its content is not what"):
        checksums.check(file)


def test_a_folder_from_elsewhere_is_read_and_says_so_once(vocabulary, tmp_path, caplog):
    copy = shutil.copytree(vocabulary, tmp_path / "elsewhere")
    with caplog.at_level("INFO", "tupe.run.checksums"):
        read_symbols(copy), Split(copy / "train"), text_encoder(copy)
    assert [record.message for record in caplog.records] == [
        f"{copy} has no checksums.json: nothing tells whether its files are whole"
    ]
