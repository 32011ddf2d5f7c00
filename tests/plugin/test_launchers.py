"""fairseq-hydra-train: jobs through Slurm's submitit."""

import importlib

from helpers import CONFIGS
from omegaconf import OmegaConf


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
