"""Many fine-tuning runs on one machine: every task x learning rate x seed, each in a process of its own.

The folder of a sweep is its only memory: OUT/<task>/lr<lr>_seed<seed>/ holds `scores.json` of a run that is done,
`failed.json` of one that failed, and `train.log`; OUT/sweep.json says what belongs to the sweep. So a sweep can be
killed, started again, and started twice at the same time.
"""

import fcntl
import itertools
import json
import signal
import sys
import time
from collections import deque
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..plugin.finetune import is_finished, read_result, write_atomically
from ..plugin.glue import glue_name
from ..plugin.launch import fairseq_arguments
from ..plugin.pretrained import model_options
from ..safe_load import num_updates, read_checkpoint
from . import runner as jobs

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)  # the paper's search
SEEDS = (1, 2, 3, 4, 5)
DECIDED = ("--lr", "--seed", "--save-dir", "--finetune-from-model", "--glue-task")  # for every job


@dataclass(frozen=True)
class Job:
    task: str
    lr: float
    seed: int
    folder: Path

    def __str__(self):
        return f"{self.task} lr {self.lr:g} seed {self.seed}"


def jobs_of(output, tasks, learning_rates, seeds):
    """All jobs of a sweep, seed by seed: one that is cut short has fewer seeds, not fewer tasks."""
    return [
        Job(task, lr, seed, Path(output) / task / f"lr{lr:g}_seed{seed}")
        for seed, task, lr in itertools.product(seeds, tasks, learning_rates)
    ]


def state_of(job):
    """What the job's folder says: "running" in some process, "done", "failed", or "open"."""
    if _is_locked(job.folder / "lock"):
        return "running"  # even with its last scores: its checkpoint is written after them
    try:
        if is_finished(read_result(job.folder)):
            return "done"
    except (ValueError, KeyError, TypeError):
        pass  # a file that was cut off: the job runs again
    return "failed" if (job.folder / "failed.json").exists() else "open"


def read_sweep(output):
    """(settings, jobs) of a sweep's folder. Raises ValueError if it is none."""
    path = Path(output) / "sweep.json"
    if not path.exists():
        raise ValueError(f"{output} is not the folder of a sweep: it has no sweep.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings, jobs_of(output, settings["tasks"], settings["learning_rates"], settings["seeds"])


class Sweep:
    """A sweep over GLUE tasks from one checkpoint.

    checkpoint, data: pre-trained model, and what prepare_glue.py wrote. output: folder of the sweep. options: more
    arguments of fairseq-train for every job. keep_best: leave the best checkpoint of each task in OUT/<task>/;
    otherwise no checkpoint is written at all.
    Raises ValueError if `output` holds the sweep of another checkpoint, of other options or of another keep_best, and
    for options that set what the sweep varies.
    """

    def __init__(
        self, checkpoint, data, output, tasks, learning_rates=LEARNING_RATES, seeds=SEEDS, options=(), keep_best=False
    ):
        self.checkpoint, self.data, self.output = (
            Path(checkpoint).resolve(),
            Path(data).resolve(),
            Path(output).resolve(),
        )
        self.keep_best = keep_best
        tasks = [glue_name(task) for task in tasks]
        if not tasks:
            raise ValueError(f"{self.data} has no prepared task; give the folder that scripts/prepare_glue.py wrote")
        for task in tasks:
            if not (self.data / task).is_dir():
                raise ValueError(f"{self.data} has no data for {task}; prepare it with scripts/prepare_glue.py")
        ours = [option for option in options if option.partition("=")[0] in DECIDED]
        if ours:
            raise ValueError(
                f"{', '.join(ours)}: the sweep decides {', '.join(DECIDED)}; give it other values of its own"
            )
        state = read_checkpoint(self.checkpoint, mmap=True)
        self.model = model_options(self.checkpoint)
        fixed = {
            "checkpoint": str(self.checkpoint),
            "updates": num_updates(state),
            "data": str(self.data),
            "options": list(options),
            "keep_best": keep_best,
        }
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output / "sweep.lock"):
            settings = {**fixed, "tasks": [], "learning_rates": [], "seeds": []}
            if (self.output / "sweep.json").exists():
                settings, _ = read_sweep(self.output)
                differ = [key for key in fixed if settings.get(key) != fixed[key]]
                if differ:
                    said = "; ".join(f"{key} {settings.get(key)} there, {fixed[key]} here" for key in differ)
                    raise ValueError(f"{self.output} holds another sweep ({said}); choose another folder")
            for key, values in (("tasks", tasks), ("learning_rates", learning_rates), ("seeds", seeds)):
                settings[key] += [value for value in values if value not in settings[key]]
            write_atomically(self.output / "sweep.json", json.dumps(settings, indent=1) + "\n")
        self.settings = settings
        self.jobs = jobs_of(self.output, tasks, learning_rates, seeds)

    def command(self, job):
        """The command line of a job: what scripts/finetune.sh runs, without leaving checkpoints behind."""
        group = "".join(c for c in job.task.lower() if c.isalnum())
        saving = ["--no-last-checkpoints", "--no-save-optimizer-state"] if self.keep_best else ["--no-save"]
        arguments = fairseq_arguments(
            ROOT / "configs",
            "finetune",
            [f"glue={group}", f"model._name={self.model[0]}"],
            [
                str(self.data), f"--user-dir={ROOT / 'tupe'}", f"--save-dir={job.folder}",
                f"--finetune-from-model={self.checkpoint}", *self.model[1:], f"--lr=[{job.lr}]", f"--seed={job.seed}",
                *saving, *self.settings["options"],
            ],
            cuda="CUDA_VISIBLE_DEVICES" in self.slots[0],
        )  # fmt: skip
        return [sys.executable, "-m", "fairseq_cli.train", *arguments]

    def run(self, slots, retry_failed=False, say=print):
        """Run what is not done yet, `len(slots)` jobs at a time; returns {job: state}. No job stops the others.

        slots: environments, see `slots`. retry_failed: run failed jobs again (those that were killed always are).
        """
        self.slots = slots
        for job in self.jobs:
            failure = jobs.read_failure(job.folder)
            if failure and (retry_failed or failure["killed"]):
                (job.folder / "failed.json").unlink(missing_ok=True)
            self._settle(job)
        states = {job: state_of(job) for job in self.jobs}
        waiting = deque(job for job, state in states.items() if state in ("open", "running"))
        done, failed = (list(states.values()).count(state) for state in ("done", "failed"))
        say(
            f"sweep: {len(states)} jobs, {done} done, {failed} failed before, {len(waiting)} to run, "
            f"{len(slots)} at a time"
        )
        started, ended, elsewhere = time.time(), 0, set()

        def begin(job, environment):
            states[job] = state_of(job)
            if states[job] == "open":
                job.folder.mkdir(parents=True, exist_ok=True)
                return jobs.start(self.command(job), job.folder / "train.log", environment, job.folder)
            if states[job] == "running":  # in another sweep: look again later, in case that one dies
                waiting.append(job)
                if job not in elsewhere:
                    say(f"sweep: {job} is running elsewhere")
                    elsewhere.add(job)

        with closing(jobs.run(waiting, slots, begin)) as results:  # jobs that are stopped from outside stay open
            for job, returncode, tail, seconds in results:
                if returncode and jobs.refused(tail):
                    waiting.append(job)
                    continue
                ended += 1
                states[job], told = self._finish(job, returncode, tail, seconds)
                number = sum(state in ("done", "failed") for state in states.values())
                left = (time.time() - started) / ended * (len(states) - number)
                say(f"sweep: {number}/{len(states)} {job}: {told}; about {left / 60:.0f} min left")
        return states

    def _finish(self, job, returncode, tail, seconds):
        result = read_result(job.folder)
        if returncode == 0 and is_finished(result):
            self._settle(job)
            name, best = best_score(result)
            return "done", f"{name} {best:.2f}, {seconds:.0f} s"
        reason = jobs.record_failure(job.folder, returncode, tail, seconds)
        self._settle(job)
        return "failed", f"FAILED ({reason}), see {job.folder / 'train.log'}"

    def _settle(self, job):
        """Leave no checkpoint in the folder of a job that is over; the task's best moves up if it is to be kept."""
        state = state_of(job)
        if state not in ("done", "failed"):
            return
        checkpoint, place = job.folder / "checkpoint_best.pt", job.folder.parent
        if state == "done" and self.keep_best:
            name, score = best_score(read_result(job.folder))
            with locked(place / "best.lock"):
                best = place / "best.json"
                is_best = not best.exists() or score > json.loads(best.read_text())["score"]
                if is_best and checkpoint.exists():
                    checkpoint.replace(place / "checkpoint_best.pt")
                    write_atomically(best, json.dumps({"score": score, "metric": name, "run": job.folder.name}) + "\n")
        for path in job.folder.glob("*.pt"):
            path.unlink(missing_ok=True)


def best_score(result):
    """(first metric, its best value on the first split) of a run."""
    name, split = result["metrics"][0], result["splits"][0]
    return name, max(record[name] for record in result["records"] if record["split"] == split)


def end_cleanly_on_sigterm():
    """Let `kill` and Slurm end this process as an interruption from the keyboard does: with its jobs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("sweep: stopped; start it again to go on"))


@contextmanager
def locked(path):
    """Hold a lock file for a moment, waiting for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_locked(path):
    if not path.exists():
        return False
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
