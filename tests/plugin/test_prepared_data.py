"""Prepared data of which something is missing or cut off: one line with the file, before anything is begun."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from tupe.cli import main
from tupe.data.splits import Split, read_symbols

HERE = ["--gpus=0", "--num-workers=0", "--allocator=none"]
PRETRAIN = [
    "pretrain", "--recipe=pretrain_small", "--arch=bert_a_tiny", "--max-update=1", "--tokens-per-sample=20", *HERE,
]  # fmt: skip


@pytest.fixture
def prepared(vocabulary, learnable):
    """{kind: folder of prepared data}"""
    return {"text": vocabulary, "glue": learnable}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def fewer(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2].rpartition(b"\n")[0] + b"\n")


def remove(path):
    path.unlink()


def twice(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n" + path.read_bytes().partition(b"\n")[0] + b"\n", 1))


def not_utf8(path):
    path.write_bytes(b"\xff" + path.read_bytes())


def forget(path):
    """Without its manifest, a dictionary that is cut off has not all ids of the text."""
    path.unlink()
    words = path.with_name("dict.txt")
    words.write_text("".join(words.read_text().splitlines(keepends=True)[:3]))


def describe(data):
    """Give a folder the part of manifest.json that says how long its dictionary is."""
    types = len((data / "dict.txt").read_text().splitlines()) + 5
    (data / "manifest.json").write_text(json.dumps({"vocab_size": types}))


@pytest.mark.parametrize("engine", ["fairseq", "torch"])
@pytest.mark.parametrize(
    "file, change, said",
    [
        *((f"{split}.{suffix}", change, rf"{split}\.(bin|idx) |no split '{split}'")
          for split, suffix, change in (("train", "bin", cut), ("train", "idx", grow), ("valid", "bin", remove),
                                        ("valid", "idx", cut))),
        ("dict.txt", remove, "it has no dict.txt"), ("dict.txt", fewer, "dict.txt makes .* not the .* cut off?"),
        ("dict.txt", twice, "dict.txt is not a dictionary: it has the type .* twice"),
        ("dict.txt", not_utf8, "dict.txt is not a dictionary: byte 0 is not UTF-8"),
        ("manifest.json", cut, "manifest.json is damaged: "), ("manifest.json", forget, "train.bin has the id .* only"),
    ],
)  # fmt: skip
def test_both_engines_name_what_is_missing_or_cut_off(vocabulary, tmp_path, file, change, said, engine):
    """In one line, before there is a folder."""
    pytest.importorskip(engine)
    data = shutil.copytree(vocabulary, tmp_path / "data")
    describe(data)
    change(data / file)
    options = [f"--engine={engine}", f"--data={data}", f"--output={tmp_path / 'run'}"]
    result = CliRunner().invoke(main, [*PRETRAIN, *options])
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and str(data) in line and re.search(said, line), result.output
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind, task, file, change",
    [
        *(("glue", "MNLI", f"input1/{split}.{suffix}", change)
          for split, suffix, change in (("train", "bin", cut), ("valid1", "idx", cut), ("valid", "bin", remove))),
        ("glue", "MNLI", "label/train.bin", cut), ("glue", "STS-B", "label/train.label", fewer),
        ("glue", "RTE", "has no RTE; prepared there: CoLA, MNLI, STS-B", None),
        ("text", "RTE", "has no RTE; prepared there: none", None),
    ],
)  # fmt: skip
def test_what_is_missing_or_cut_off_is_named(prepared, pretrained, tmp_path, kind, task, file, change):
    data = shutil.copytree(prepared[kind], tmp_path / "data")
    describe(data)
    if change:
        change(data / (task if kind == "glue" else "") / file)
    tune = ["finetune", f"--task={task}", f"--checkpoint={pretrained}", "--max-epoch=1", *HERE]
    words = tune if task else PRETRAIN
    result = CliRunner().invoke(main, [*words, f"--data={data}", f"--output={tmp_path / 'run'}"])
    line = result.stderr.splitlines()[-1]
    split = file.rpartition("/")[2].partition(".")[0]
    named = [file, *([f"has no split {split!r}"] if change is remove else [])]
    assert result.exit_code == 2 and str(data) in line and any(name in line for name in named), result.output
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()


def test_evaluations_name_it_too(vocabulary, pretrained, tmp_path):
    data = shutil.copytree(vocabulary, tmp_path / "data")
    cut(data / "valid.bin")
    result = CliRunner().invoke(main, ["order", str(pretrained), f"--data={data}", f"--output={tmp_path / 'out'}"])
    assert result.exit_code == 2 and f"{data}/valid.bin has" in result.output and not (tmp_path / "out").exists()


def test_what_is_whole_is_taken(prepared):
    for kind, folder in prepared.items():
        read_symbols(folder)
        for index in folder.rglob("*.idx"):
            assert len(Split(index.with_suffix(""))) > 0, kind
