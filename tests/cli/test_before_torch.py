"""What the commands that train refuse before torch and an engine are imported."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import PLUGIN, write_data

from tupe.cli.train import check_folder, check_schemes
from tupe.common.recipes import read
from tupe.schemes import SCHEMES

PROGRAM = """
import builtins, sys
original = builtins.__import__
def guarded(name, *args):
    if name.partition(".")[0] in ("torch", "fairseq", "hydra", "transformers", "sklearn"):
        raise RuntimeError(name)
    return original(name, *args)
builtins.__import__ = guarded
from tupe.cli import main
main(sys.argv[1:], prog_name="tupe")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, raw text, and a file that is a checkpoint as far as its head shows."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_data(folder / "data")
    (folder / "raw").mkdir()
    (folder / "raw" / "a.txt").write_text("Some text.")
    with zipfile.ZipFile(folder / "whole.pt", "w") as archive:
        archive.writestr("whole/data.pkl", b"")
    return folder


PRETRAIN, FINETUNE = "pretrain --recipe=pretrain_small", "finetune --task=RTE --checkpoint={}/whole.pt"
MISTAKES = {  # words, with the folder in place of {} -> what is said
    PRETRAIN + " --data={}/data --max-updat=5": "unknown option --max-updat; did you mean '--max-update'?",
    PRETRAIN + " --data={}/data --arhc tupe_r": "unknown option --arhc; did you mean '--arch'?",
    PRETRAIN + " --data={}/data --fp61": "unknown option --fp61; did you mean '--fp16'?",
    PRETRAIN + " --data={}/data --learning-rate 1e-4": "unknown option --learning-rate; did you mean '--lr'?",
    PRETRAIN + " --data={}/none": "data folder not found: {}/none",
    PRETRAIN + " --data={}/raw": "`tupe prepare corpus` makes one of raw text",
    PRETRAIN + " --data={}/data --arch=tupe_rr": "--arch: unknown value 'tupe_rr'; did you mean 'tupe_r'?",
    PRETRAIN + " --data={}/data --engine=transformers --arch=tupe_rr": "did you mean 'tupe_r'?",
    PRETRAIN
    + " --data={}/data --position alibii": "unknown position scheme 'alibii' in 'alibii'; did you mean 'alibi'?",
    PRETRAIN + " --data={}/data --position t5+RoPE": "in 't5+RoPE'; did you mean 'rope'?",
    PRETRAIN + " --data={}/data --position TUPE-R": "give --arch tupe_r, or --position untied+t5 --cls untied",
    PRETRAIN + " --data={}/data --arch TUPE_R": "--arch: unknown value 'TUPE_R'; did you mean 'tupe_r'?",
    "pretrain --recipe=pretrain_smal --data={}/data": "'pretrain_smal' is not known; did you mean 'pretrain_small'?",
    PRETRAIN + " --data={}/data --preset ropee": "model=ropee not found; did you mean 'rope'?",
    PRETRAIN + " --data={}/data --lr abc": "--lr is abc; valid: numbers from 0 to 100",
    PRETRAIN + " --data={}/data --engine transformers --lr abc": "--lr is abc; valid: numbers from 0 to 100",
    PRETRAIN + " --data={}/data --heartbeat-timeout=9": "settings of fairseq's own: SECTION.KEY=VALUE",
    PRETRAIN + " --data={}/data --engine=transformers --max-updat=5": "did you mean '--max-update'?",
    PRETRAIN + " --data={}/data --max-tokens 10": "--max-tokens is 10: a sequence has 128; valid: at least 128",
    PRETRAIN + " --data={}/data --valid-subset=dev": "has no split 'dev'; valid: train, valid",
    PRETRAIN + " --data={}/data model.dropout=2": "--dropout is 2; valid: 0 to 0.99",
    FINETUNE + " --data={}/data": "has no RTE; prepared there: none",
    FINETUNE + " --data={}/data --checkpoint={}/raw/a.txt": "is no checkpoint: torch did not write it",
}


@pytest.fixture(scope="module")
def refusals(folder):
    """{words: (status, standard output, lines of standard error)} of all mistakes, made in one interpreter."""
    commands = [[*words.replace("{}", str(folder)).split(), f"--output={folder / 'run'}"] for words in MISTAKES]
    call = "import json\nfrom click.testing import CliRunner\nfor words in json.loads(sys.argv[1]):\n"
    call += "    done = CliRunner().invoke(main, words, prog_name='tupe')\n"
    call += "    print(json.dumps([done.exit_code, done.stdout, done.stderr.splitlines()]))\n"
    program = PROGRAM.replace('main(sys.argv[1:], prog_name="tupe")\n', call)
    words = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PLUGIN.parent)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return dict(zip(MISTAKES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_refused_before_torch_is_imported(words, folder, refusals):
    pytest.importorskip("fairseq")
    status, shown, said = refusals[words]
    assert (status, shown) == (2, "")
    assert MISTAKES[words].replace("{}", str(folder)) in said[-1], said
    assert len(said) == 1 or said[0].startswith("Usage:") and len(said) <= 4
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        pytest.param(
            "--position=untied+alibi:slop:2",
            "unknown option 'slop' of alibi in 'untied+alibi:slop:2'",
            marks=pytest.mark.thorough,
        ),
        ("--fp16", "--fp16 needs a GPU; valid here: float32 without --fp16, or --autocast bf16"),
    ],
)
def test_what_torch_shows_is_refused_before_an_engine_is_imported(word, said, folder):
    words = ["pretrain", f"--data={folder / 'data'}", f"--output={folder / 'run'}", "--gpus=0", word]
    program = PROGRAM.replace('"torch", "fairseq"', '"fairseq"')
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=PLUGIN.parent)
    assert done.returncode == 2 and said in done.stderr


def test_a_folder_of_another_run_is_refused_before_torch_is_imported(folder):
    run = folder / "other"
    run.mkdir()
    record = '{"architecture": "tupe_r_tiny", "seed": 1, "lr": 0.001, "started_at": "2026-01-01 00:00:00+0000"}'
    (run / "record.json").write_text(record)
    words = ["--recipe=pretrain_small", f"--data={folder / 'data'}", f"--output={run}", "--lr=2e-3", "--seed", "2"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "pretrain", *words], capture_output=True, text=True, cwd=PLUGIN.parent
    )
    there = "architecture tupe_r_tiny there, tupe_r here; seed 1 there, 2 here; lr 0.001 there, 0.002 here"
    assert f"{run} holds another run ({there})" in done.stderr
    check_folder(run, read("pretrain_small", ["model._name=tupe_r_tiny"]))  # the same run
    shutil.rmtree(run)


def test_every_encoding_is_known():
    check_schemes("+".join(f"{name}:layer" for name in SCHEMES))
