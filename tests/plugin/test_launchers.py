"""Hydra launchers for sweeps: on this machine with one process per job, and through Slurm's submitit."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_launcher_configuration_builds_its_launcher(name):
    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/hydra/launcher" / f"{name}.yaml"))
    module, _, kind = settings.pop("_target_").rpartition(".")
    settings = {key: value for key, value in settings.items() if "${" not in str(value)}
    launcher = getattr(importlib.import_module(module), kind)(**settings)
    assert launcher.jobs is None if name == "local" else launcher.params["gpus_per_node"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "submitit_local"])
def test_multirun(launcher, learnable, pretrained, tmp_path):
    """One job diverges: the other is done all the same, in a process of its own, and is not run again."""
    command = [
        sys.executable, "-m", "fairseq_cli.hydra_train", "-m", "--config-dir", "configs", "--config-name", "finetune",
        f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}", "glue=cola", "optimization.lr=[1e9],[1e-3]",
        "common.seed=1", "model._name=tupe_r_tiny", "+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=32",
        f"task.data={learnable}", f"checkpoint.finetune_from_model={pretrained}", "checkpoint.save_dir=.",
        "checkpoint.no_save=true", "optimization.max_epoch=2", "common.fp16=false", "common.cpu=true",
        "dataset.num_workers=0",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    times = []
    for _ in range(2):
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert run.returncode != 0 and ("1 of 2 jobs failed" if launcher == "local" else "Nan/Inf") in run.stderr
        found = {path: json.loads(path.read_text())["records"] for path in tmp_path.glob("CoLA/*/scores.json")}
        scores = max(found, key=lambda path: len(found[path]))
        assert sorted(map(len, found.values())) == [0, 2]
        times.append(scores.stat().st_mtime_ns)
        (failure,) = tmp_path.glob("CoLA/*/failed.json")
        if launcher == "local":  # Hydra keeps the error of a submitted job to itself
            assert json.loads(failure.read_text())["reason"] == "diverged"
        assert not list(tmp_path.rglob("*.pt"))
    assert times[0] == times[1]
