"""Hydra launcher `local`: the jobs of a multirun on this machine, a bounded number at a time, a process for each.

Hydra's own launchers for one machine run several jobs in one process; fairseq keeps state between them (the best score
so far), so that later jobs do not write their best checkpoint.
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from hydra._internal.utils import get_args
from hydra.core.utils import filter_overrides
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
        from tupe.sweep import record_failure, slots, tail_of

        environments = slots(self.jobs)
        free, running, results, failed = list(range(len(environments))), [], [], []
        log.info(f"{len(queue)} jobs, {len(free)} at a time")
        try:
            while queue or running:
                while queue and free:
                    job, slot = queue.pop(0), free.pop()
                    (job.working_dir / "failed.json").unlink(missing_ok=True)
                    with (job.working_dir / "launcher.log").open("a") as out:
                        job.offset, job.start = out.tell(), time.time()
                        process = subprocess.Popen(
                            job.command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environments[slot]}
                        )
                    running.append((job, process, slot))
                for entry in [entry for entry in running if entry[1].poll() is not None]:
                    job, process, slot = entry
                    running.remove(entry)
                    free.append(slot)
                    results.append(job)
                    told = "done"
                    if process.returncode:
                        failed.append(job)
                        path = job.working_dir / "launcher.log"
                        tail, seconds = tail_of(path, job.offset), time.time() - job.start
                        reason = record_failure(job.working_dir, process.returncode, tail, seconds)
                        told = f"FAILED ({reason}), see {path}"
                        (job.working_dir / "crash.pt").unlink(missing_ok=True)  # fairseq's, of a diverged run
                    log.info(f"#{job.index} {' '.join(filter_overrides(job.overrides))}: {told}")
                time.sleep(0.2)
        finally:
            for _, process, _ in running:
                process.terminate()
        if failed:  # after all others have had their turn
            folders = ", ".join(str(job.working_dir) for job in failed)
            raise RuntimeError(f"{len(failed)} of {len(results)} jobs failed: {folders}")
        return sorted(results, key=lambda job: job.index)

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
