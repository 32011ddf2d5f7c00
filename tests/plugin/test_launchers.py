"""fairseq-hydra-train: several jobs in one process train as each would alone; jobs through Slurm's submitit."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from helpers import CONFIGS, PLUGIN, load, write_data
from omegaconf import OmegaConf


def hydra_train(folder, *words):
    """Run it in a folder of its own: nothing depends on the working directory."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLUGIN.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_jobs_of_one_process_equal_separate_processes(tmp_path):
    """The second job is worse than the first: with the best loss that fairseq keeps from the first it would write no
    checkpoint_best.pt, and with the schemas that the first has registered Hydra would give it another size."""
    data = write_data(tmp_path / "data")
    common = [
        "--config-dir", str(CONFIGS), "--config-name", "pretrain", f"task.data={data}", "task.tokens_per_sample=24",
        "dataset.batch_size=8", "optimization.update_freq=[1]", "optimization.max_update=4", "dataset.num_workers=0",
        "lr_scheduler.warmup_updates=1", "common.fp16=false", "common.cpu=true", "model._name=tupe_r_tiny",
    ]  # fmt: skip
    rates = ["optimization.lr=[0.01]", "optimization.lr=[1e-09]"]
    sweep = [",".join([rates[0], rates[1].split("=")[1]]), f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    hydra_train(tmp_path / "here", "-m", *common, *sweep)
    hydra_train(tmp_path / "there", *common, rates[1], f"hydra.run.dir={tmp_path / 'alone'}")
    (first,), (second,) = ((tmp_path / "sweep").glob(f"*{rate.replace('[', '[[]')}*") for rate in rates)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        better, one, other = (load(f / "checkpoints" / name) for f in (first, second, tmp_path / "alone"))
        assert better["extra_state"]["best"] < one["extra_state"]["best"] == other["extra_state"]["best"]
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        assert one["cfg"]["model"] == other["cfg"]["model"]
        assert one["cfg"]["common"]["user_dir"] == str(PLUGIN)


def test_every_recipe_tells_the_jobs_of_a_sweep_apart():
    """By everything that was said; of what is left out, the run's record refuses another checkpoint."""
    for recipe in CONFIGS.glob("*.yaml"):
        assert "shared/run" in OmegaConf.load(recipe).defaults
    shared = OmegaConf.to_container(OmegaConf.load(CONFIGS / "shared" / "run.yaml"), resolve=False)
    assert shared["hydra"]["sweep"]["subdir"] == "${hydra.job.override_dirname}"


def test_slurm_configuration_builds_its_launcher():
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / "hydra" / "launcher" / "slurm.yaml"))
    module, _, kind = settings.pop("_target_").rpartition(".")
    settings = {key: value for key, value in settings.items() if "${" not in str(value)}
    launcher = getattr(importlib.import_module(module), kind)(**settings)
    assert launcher.params["gpus_per_node"] == 1
