"""Hydra launcher `local`: the jobs of a multirun on this machine, a bounded number at a time, a process for each.

Hydra's own launchers for one machine run several jobs in one process; fairseq keeps state between them (the best score
so far), so that later jobs do not write their best checkpoint.
"""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

from hydra._internal.utils import get_args
from hydra.plugins.launcher import Launcher

log = logging.getLogger(__name__)
# Overrides that are this process's business, not the jobs'.
OURS = ("hydra.mode", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep", "hydra.run")


class ProcessLauncher(Launcher):
    """jobs: how many at a time; by default one per GPU, or one on a CPU."""

    def __init__(self, jobs=None):
        self.jobs = jobs

    def setup(self, *, config, task_function, **context):
        # Hydra 1.0 hands over the loader of configurations itself, later versions a context that holds it.
        self.config = config
        self.loader = context["config_loader"] if "config_loader" in context else context["hydra_context"].config_loader

    def launch(self, job_overrides, initial_job_idx):
        queue = [self._prepare(list(words), initial_job_idx + i) for i, words in enumerate(job_overrides)]
        # Only now: the plugin registers schemas, with which Hydra would read the configuration in another way.
        from tupe.experiments import runner

        jobs = {runner.Job(f"#{job.index}", job.working_dir, tuple(job.command)): job for job in queue}
        states = runner.run(list(jobs), runner.slots(self.jobs), echo=log.info, title="multirun")
        failed = [str(jobs[job].working_dir) for job, state in states.items() if state != "finished"]
        if failed:  # after all others have had their turn
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")
        return list(jobs.values())

    def _prepare(self, overrides, index):
        sweep = self.loader.load_sweep_config(self.config, overrides).hydra
        folder = Path(str(sweep.sweep.dir), str(sweep.sweep.subdir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        args = get_args()
        command = [sys.executable, "-m", "fairseq_cli.hydra_train", "--config-name", args.config_name or "config"]
        command += ["--config-dir", str(Path(args.config_dir).absolute())] if args.config_dir else []
        others = [word for word in self.config.hydra.overrides.hydra if not word.startswith(OURS)]
        command += [*overrides, *others, f"hydra.run.dir={folder}"]
        return SimpleNamespace(index=index, overrides=overrides, command=command, working_dir=folder, return_value=None)
