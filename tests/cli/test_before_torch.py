"""What the commands that train refuse before torch and an engine are imported."""

import json
import subprocess
import sys

import pytest
from helpers import PLUGIN, write_data

from tupe.cli.train import check_schemes
from tupe.schemes import SCHEMES

PROGRAM = """
import builtins, sys
original = builtins.__import__
def guarded(name, *args):
    if name.partition(".")[0] in ("torch", "fairseq", "hydra", "transformers", "sklearn"):
        raise RuntimeError(name)
    return original(name, *args)
builtins.__import__ = guarded
import json
from click.testing import CliRunner
from tupe.cli import main
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words, prog_name="tupe")
    print(json.dumps([done.exit_code, done.stdout, done.stderr.splitlines()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and raw text."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_data(folder / "data")
    (folder / "raw").mkdir()
    (folder / "raw" / "a.txt").write_text("Some text.")
    return folder


PRETRAIN = "pretrain --recipe=pretrain_small --data={}/data "
MISTAKES = {  # words, with the folder in place of {} -> what is said
    PRETRAIN + "--max-updat=5": "unknown option --max-updat; did you mean '--max-update'?",
    PRETRAIN + "--engine=torch --arhc tupe_r": "unknown option --arhc; did you mean '--arch'?",
    PRETRAIN + "--engine=torch --precison": "unknown option --precison; did you mean '--precision'?",
    PRETRAIN + "--learning-rate 1e-4": "unknown option --learning-rate; did you mean '--lr'?",
    PRETRAIN + "--rel-pos": "unknown option --rel-pos; did you mean '--arch tupe_r'?",
    PRETRAIN + "--engine=pytorch": "'pytorch' is not known; did you mean 'torch'?",
    PRETRAIN + "--data={}/none": "data folder not found: {}/none",
    PRETRAIN + "--data={}/raw": "{}/raw is not a folder of prepared data: it has no dict.txt",
    PRETRAIN + "--arch TUPE_R": "--arch: unknown value 'TUPE_R'; did you mean 'tupe_r'?",
    PRETRAIN + "--position t5+RoPE": "unknown position scheme 'RoPE' in 't5+RoPE'; did you mean 'rope'?",
    PRETRAIN + "--position TUPE-R": "give --arch tupe_r, or --position untied+t5 --cls untied",
    PRETRAIN + "--recipe=pretrain_smal": "'pretrain_smal' is not known; did you mean 'pretrain_small'?",
    PRETRAIN + "--preset ropee": "model=ropee not found; did you mean 'rope'?",
    PRETRAIN + "--engine=torch --lr abc": "--lr is abc; valid: numbers from 0 to 100",
    PRETRAIN + "--heartbeat-timeout=9": "settings of fairseq's own: SECTION.KEY=VALUE",
    PRETRAIN + "model.dropout=2": "--dropout is 2; valid: 0 to 0.99",
}


@pytest.fixture(scope="module")
def refusals(folder):
    """{words: (status, standard output, lines of standard error)} of all mistakes, made in one interpreter."""
    commands = [[*words.replace("{}", str(folder)).split(), f"--output={folder / 'run'}"] for words in MISTAKES]
    words = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
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


def test_every_encoding_is_known():
    check_schemes("+".join(f"{name}:layer" for name in SCHEMES))
