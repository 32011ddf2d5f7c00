"""The shell scripts: commands they would run, refusals, and the installations of setup.sh."""

import importlib.util
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import PLUGIN, write_data

from tupe.experiments.summary import unigram_entropy

ROOT = PLUGIN.parent
SCRIPTS = ROOT / "scripts"


def bash(script, *arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, "GPUS": "0", "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.s*h*")), ids=lambda path: path.name)
def test_script_is_valid_bash(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_slurm_job_starts_torchrun_once_per_node(tmp_path):
    """With stand-ins for Slurm's own commands: srun runs the task of each of two nodes."""
    srun = 'for node in 0 1; do SLURM_NODEID=$node "$@"; done'
    for name, text in {"srun": srun, "scontrol": "echo first; echo second"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = bash(
        SCRIPTS / "pretrain.sbatch", "DATA", tmp_path / "run", "--seed=7", DRY_RUN="1", GPUS="8", ARCH="bert_a_large",
        PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if "torch.distributed.run" in line]
    for rank, command in enumerate(commands):
        assert f"--nnodes 2 --node-rank {rank} --master-addr first --master-port 20005" in command
        words = command.split()
        for word in ("--arch=bert_a_large", "--seed=7", "--batch-size=16", "--distributed-world-size=16", "--fp16"):
            assert word in words
        assert "--cpu" not in words
    assert len(commands) == 2 and not (tmp_path / "run").exists()


def test_bad_recipe_stops_before_training(tmp_path):
    done = bash(SCRIPTS / "pretrain.sh", "DATA", tmp_path / "run", GPUS="3", DRY_RUN="1")
    assert done.returncode != 0 and "cannot be split evenly over 3 processes" in done.stderr
    assert "fairseq_cli" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, ["--arch=tupe_r"]),
        ({"RECIPE": "pretrain_large"}, ["--arch=tupe_r_large"]),
        ({"RECIPE": "pretrain_electra"}, ["--arch=electra_tupe_r"]),
        ({"SET": "model=shaw"}, ["--arch=bert_a", "--position=shaw+shaw_values"]),
        ({"SET": "model=shaw", "ARCH": "bert_a_mini"}, ["--arch=bert_a_mini", "--position=shaw+shaw_values"]),
    ],
)
def test_architecture_is_the_recipe_s_unless_another_is_given(variables, words, tmp_path):
    done = bash(SCRIPTS / "pretrain.sh", "DATA", tmp_path / "run", DRY_RUN="1", **variables)
    assert done.returncode == 0 and set(words) <= set(done.stdout.split()), done.stderr
    assert "--cls" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SET": "+seed=3"}, "seed=3 belongs to no section"),
        ({"SET": "comon.fp16=false"}, "comon"),
        ({"NNODES": "2"}, "NNODES=2 needs GPUs"),
    ],
)
def test_mistakes_in_variables_end_with_a_reason(variables, message, tmp_path):
    done = bash(SCRIPTS / "pretrain.sh", "DATA", tmp_path / "run", DRY_RUN="1", **variables)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_every_script_explains_itself(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert not end.value.code and "usage: " in capsys.readouterr().out


def test_memory_allocator_is_preloaded(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "preloaded: $LD_PRELOAD"\n')
    python.chmod(0o755)
    library = next(Path("/").glob("lib*/**/libm.so.6"), None) or pytest.skip("no library to preload is known here")

    def run(**variables):
        return bash(SCRIPTS / "pretrain.sh", "DATA", tmp_path / "run", PYTHON=str(python), **variables)

    assert f"preloaded: {library}\n" in run(ALLOCATOR=str(library), LD_PRELOAD="").stdout
    assert "preloaded: \n" in run(ALLOCATOR="none", LD_PRELOAD="").stdout
    assert f"preloaded: {library}\n" in run(ALLOCATOR="/other.so", LD_PRELOAD=str(library)).stdout  # theirs stays
    refused = run(ALLOCATOR="/nothing.so", LD_PRELOAD="")
    assert refused.returncode == 2 and "no such library: ALLOCATOR=/nothing.so" in refused.stderr

    ldconfig = tmp_path / "ldconfig"  # as on a system that has tcmalloc
    ldconfig.write_text(f"#!/bin/bash\necho 'libtcmalloc_minimal.so.4 (libc6,x86-64) => {library}'\n")
    ldconfig.chmod(0o755)
    found = run(LD_PRELOAD="", PATH=f"{tmp_path}:{os.environ['PATH']}")
    expected = "" if Path("/dev/nvidiactl").exists() else library
    assert f"preloaded: {expected}\n" in found.stdout


def test_usage_is_shown():
    for name in ("pretrain.sh", "finetune.sh"):
        done = bash(SCRIPTS / name)
        assert done.returncode == 2 and f"scripts/{name}" in done.stderr


FAKE_PYTHON = """#!/bin/bash
# A Python that only notes what it is asked to install.
case "$1 $2" in
  "-m venv") mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip") echo "${@:3}" >> "$FAKE_LOG" ;;
  "--version ") echo "Python 3.11.0" ;;
esac
"""


def test_setup_installs_once_and_again_when_requirements_change(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copytree(SCRIPTS / "requirements", tmp_path / "scripts/requirements")
    shutil.copy(SCRIPTS / "setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)

    def setup(*arguments):
        log = tmp_path / "log"
        log.write_text("")
        script = tmp_path / "scripts/setup.sh"
        done = bash(script, *arguments, PYTHON=str(tmp_path / "python"), FAKE_LOG=str(log))
        return done, log.read_text()

    done, installed = setup()
    assert done.returncode == 0, done.stderr
    torch_first, everything = installed.index("torch=="), installed.index("-r scripts/requirements/current.txt")
    assert torch_first < everything < installed.index("--no-deps fairseq-fixed==") < installed.index("-e .")
    done, installed = setup()
    assert done.stdout == "setup: .venv is up to date\n" and not installed
    with (tmp_path / "scripts/requirements/current.txt").open("a") as file:
        file.write("another==1.0\n")
    assert "-r scripts/requirements/current.txt" in setup()[1]
    assert not (tmp_path / ".venv-volta").exists()
    done, installed = setup("--stack", "volta")
    assert done.returncode == 0 and "fairseq==0.12.2" in installed and (tmp_path / ".venv-volta").exists()
    done, _ = setup("--stack", "cuda9")
    assert done.returncode == 2 and "valid: current, volta" in done.stderr


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPTS / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("loss, learned", [(4.2, True), (4.4, False)])
def test_quickstart_table_says_whether_anything_was_learned(quickstart, tmp_path, capsys, loss, learned):
    write_data(tmp_path / "data")
    entropy = unigram_entropy(tmp_path / "data") / math.log(2)
    counts = np.bincount(np.fromfile(tmp_path / "data" / "train.bin", dtype=np.uint16))
    assert entropy == pytest.approx(scipy.stats.entropy(counts, base=2)) == pytest.approx(4.6, abs=0.01)
    for arch, parameters in {"bert_a": 1_230_000, "tupe_r": 1_340_000}.items():
        (tmp_path / f"{arch}_tiny").mkdir()
        torch.save({"model": {"weight": torch.zeros(parameters)}}, tmp_path / f"{arch}_tiny" / "checkpoint_last.pt")
        (tmp_path / f"{arch}_tiny.pretrain.log").write_text(
            "1 | INFO | train_inner | epoch 001: 5 / 9 loss=5.4, wps=1500.5, ups=2, num_updates=5\n"
            f"1 | INFO | valid | epoch 001 | valid on 'valid' subset | loss {loss} | ppl 9 | wps 7 | num_updates 1234\n"
        )
        (tmp_path / f"{arch}_tiny_stsb").mkdir()
        records = [{"split": "valid", "pearson": score, "spearman": score + 1} for score in (30.04, 41.26, 35)]
        (tmp_path / f"{arch}_tiny_stsb" / "scores.json").write_text(json.dumps({"records": records}))
    if learned:
        quickstart.table(tmp_path)
    else:
        with pytest.raises(SystemExit, match="nothing was learned(.|\n)*TUPE-R: validation loss 4.40"):
            quickstart.table(tmp_path)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    assert rows[2] == ["BERT-A tiny", "1,234", "1.23 M", "1,500", f"{loss:.2f}", f"{entropy:.2f}", "41.3", "42.3"]
    assert rows[3][0] == "TUPE-R tiny" and rows[3][2] == "1.34 M"
    assert "Base" in rows[4][0] and rows[4][-2] == "89.43"
