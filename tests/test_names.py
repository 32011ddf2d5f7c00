"""Odd names of folders and odd locales, with commands as they are typed."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from helpers import PLUGIN, official_folder

from tupe.cli import main

TRAIN = "--gpus=0 --num-workers=0 --allocator=none"
MODELS = {  # of the pipeline's engine: what it trains, and what that is when it was exported and converted back
    "fairseq": {"model": "run/checkpoint_last.pt", "again": "back/checkpoint.pt"},
    "transformers": {"model": "run", "again": "run"},
}
PIPELINE = [  # run in a folder of that name; {0}: its path
    "prepare corpus raw/a.txt --output {0}/data --vocab-size=60 --jobs=2 --valid-fraction=0.3",
    "pretrain --data data --output {0}/run --arch=tupe_r_tiny --recipe=pretrain_small --max-update=2 "
    f"--tokens-per-sample=32 --batch-size=4 --engine={{engine}} {TRAIN}",
    "prepare glue --glue glue --data {0}/data --output bin --tasks=RTE --jobs=1",
    "finetune --task=RTE --data bin --checkpoint {model} --output {0}/tuned --max-epoch=1 --engine={engine} "
    f"{TRAIN}",
    "checkpoint export --checkpoint run/checkpoint_last.pt --data data --output {0}/hf",
    "checkpoint convert --from {0}/hf --output back",
    "minimal-pairs X={0}/{again} {model} --data data --pairs raw/pairs.txt --output pairs",
    "plot loss X={0}/run run --output {0}/loss.png",
    "plot t5 --checkpoint={0}/{model} --output t5.svg",
    "probe properties {model} --words=2",
    "report {0} --output report",
]


def tupe(words, cwd=PLUGIN.parent, redirect="", **variables):
    """The command `tupe` in a shell."""
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN.parent), "OMP_NUM_THREADS": "1", **variables}
    command = os.fsencode(f"{sys.executable} -m tupe {words} {redirect}")
    return subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, env=environment, timeout=240)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    (folder / "a.txt").write_text("\n\n".join(f"The cat {i} sat on the old mat, the birds sang." for i in range(80)))
    (folder / "pairs.txt").write_text("Cat the sat.\nThe cat sat.\n")
    return folder


def check_pipeline(folder, name, raw, run, engine="fairseq"):
    """run(words): a result of the command `tupe`, with exit_code, stdout and stderr as bytes, run in that folder."""
    shutil.copytree(raw, folder / "raw")
    official_folder(folder / "glue")
    pipeline = [words for words in PIPELINE if engine == "fairseq" or not words.startswith("checkpoint ")]
    for words in pipeline:
        status, stdout, stderr = run(words.format(shlex.quote(str(folder)), engine=engine, **MODELS[engine]))
        assert status == 0 and b"Traceback" not in stderr, (words, stdout, stderr)
        assert not words.startswith("plot loss") or name in stdout  # as it is, not a replacement
    made = {"data", "run", "bin", "tuned", "pairs", "loss.png", "t5.svg", "report"}
    made |= {"hf", "back"} if engine == "fairseq" else set()
    assert made <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("engine", MODELS)
@pytest.mark.thorough
def test_every_name_of_a_folder_works(engine, raw, tmp_path, monkeypatch):
    """Characters that mean something to Hydra, to a shell or to `LABEL=PATH`."""
    if engine == "fairseq":
        pytest.importorskip("fairseq")
    name = "légal,lr=1 '[x]{y}%"
    folder = tmp_path / name

    def run(words):
        result = CliRunner().invoke(main, shlex.split(words), prog_name="tupe")
        return result.exit_code, result.stdout_bytes, result.stderr_bytes

    folder.mkdir()
    monkeypatch.chdir(folder)
    check_pipeline(folder, name.encode(), raw, run, engine)


@pytest.mark.slow
@pytest.mark.parametrize("python", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_every_locale_works(python, raw, tmp_path):
    folder = tmp_path / "œuvre"

    def run(words):
        done = tupe(words, folder, LC_ALL="C", **python)
        return done.returncode, done.stdout, done.stderr

    folder.mkdir()
    check_pipeline(folder, "œuvre".encode(), raw, run)


def test_names_that_are_not_utf_8_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode("é".encode("latin-1"))
    folder.mkdir()

    def refused(words):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "is not UTF-8; rename" in result.stderr

    refused(["list", "presets", "--output", str(folder)])
    monkeypatch.chdir(folder)
    refused(["list", "presets"])


@pytest.mark.parametrize("sign", [":", "${seed}"])
def test_names_that_fairseq_does_not_take_are_refused(sign, raw, vocabulary, pretrained, tmp_path, monkeypatch):
    """... where the folder is made, also if it is the working directory's name; not only where it is read."""
    official_folder(tmp_path / "glue")
    odd = tmp_path / f"a{sign}b"
    shutil.copytree(vocabulary, odd / "data")
    monkeypatch.chdir(odd)
    before = sorted(odd.rglob("*"))
    for words in (
        f"prepare corpus {raw}/a.txt", f"prepare glue --glue {tmp_path}/glue --data {vocabulary}",
        "pretrain --data data", f"finetune --task RTE --data data --checkpoint {pretrained}",
    ):  # fmt: skip
        for output in ("x", str(odd / "x")):
            result = CliRunner().invoke(main, [*words.split(), f"--output={output}"])
            said = f"fairseq takes {sign[:2]!r}" in result.stderr or "choose another path" in result.stderr
            assert result.exit_code == 2 and said, result.output
            assert result.stderr.count("\n") == 1 and sorted(odd.rglob("*")) == before
    words = ["pretrain", "--data", vocabulary, "--output", tmp_path / "o" / "${seed}", "--allocator=none"]
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 2 and "choose another path" in result.stderr and result.stderr.count("\n") == 1
