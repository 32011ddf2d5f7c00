"""Many runs on one machine: a process for each, a bounded number at a time, and their states.

A run's state comes from the exit status of its process and from the record in its folder, from nothing else. So a
runner can be stopped and started again, and several can share the same jobs.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from ..run import record, stop
from ..run.processes import PROGRAM

SECONDS_TO_END = 150  # between asking a process to end and killing it; Slurm gives 180 (scripts/jobs.sbatch)
DEAD_WORKER = "DataLoader worker (pid"  # how PyTorch's error begins
SECONDS_TO_NEXT_LOOK = 5  # at a folder that another process holds


@dataclass(frozen=True)
class Job:
    """A command whose process keeps its record in `folder`. name: for people."""

    name: str
    folder: Path
    command: tuple

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    def __str__(self):
        return self.name


def tupe(command: str, options: dict) -> tuple:
    """The words of a command of `tupe`: tupe("finetune", {"--seed": 1}) -> (..., "finetune", "--seed=1").

    options: {name: value}; None marks a switch, and a name without leading dashes is a Hydra override.
    """
    words = [name if value is None else f"{name}={value}" for name, value in options.items()]
    return (*PROGRAM, command, *words)


def slots(count: int | None = None) -> list:
    """Environments of the processes that run at a time: one per GPU, or `count` (default 1) processes that share the
    threads PyTorch would take."""
    gpus = torch.cuda.device_count()
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",")[:gpus] if visible else range(gpus)
        return [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in names][:count]
    count = count or 1
    return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}] * count


def run(
    jobs: list,
    slots: list,
    retry_failed: bool = False,
    on_done: Callable[[Job, str], Any] = lambda job, state: None,
    echo: Callable[[str], Any] = click.echo,
    title: str = "sweep",
) -> dict:
    """Run the jobs that are not finished, `len(slots)` at a time -> {job: "finished", "failed" or "open"}.

    slots: see `slots`. No job's failure stops the others; a failed job is run again only if `retry_failed`, a killed
    one always. It waits for jobs that another process runs. on_done(job, state) is called for every job that
    is over, also for those that were over before. echo: prints one line. On SIGTERM, SIGINT, SIGHUP and SIGUSR1 all
    processes are asked to end, and SystemExit is raised when they have; a second signal kills them.
    """
    states = {job: record.state_of(job.folder) for job in jobs}
    retried = {job for job, state in states.items() if state == "failed"} if retry_failed else set()
    over = {job: state for job, state in states.items() if state in ("finished", "failed") and job not in retried}
    for job, state in over.items():
        on_done(job, state)
    waiting = [job for job in jobs if job not in over]
    counts = ", ".join(f"{list(over.values()).count(state)} {state}" for state in ("finished", "failed"))
    echo(f"{title}: {len(jobs)} jobs, {counts}; {len(waiting)} to run, {len(slots)} at a time")

    began, to_run = time.monotonic(), len(waiting)

    def note_end(job, state, what):
        over[job] = state
        on_done(job, state)
        left = len(jobs) - len(over)
        seconds = (time.monotonic() - began) / (to_run - left) * left
        about = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
        echo(f"{title}: {len(over)}/{len(jobs)} {job}: {what}" + f"; about {about} left" * (left > 0))

    free, running, next_look, received = list(slots), {}, {}, []
    # Noted down, so that none of them comes between the start of a process and its entry in `running`.
    with stop.handled(stop.SIGNALS, lambda number, frame: received.append((number, time.monotonic()))):
        try:
            while (waiting or running) and not received:
                for job in list(waiting):
                    if not free:
                        break
                    if time.monotonic() < next_look.get(job, 0):
                        continue
                    state = record.state_of(job.folder)
                    if state == "running":
                        if job not in next_look:
                            echo(f"{title}: {job} runs in another process; waiting for it")
                        next_look[job] = time.monotonic() + SECONDS_TO_NEXT_LOOK
                        continue
                    waiting.remove(job)
                    if state == "finished" or (state == "failed" and job not in retried):  # by another runner
                        note_end(job, state, f"{state} by another process")
                    else:
                        slot = free.pop()
                        before = record.contents(job.folder)
                        running[job] = start(job, slot), slot, time.monotonic(), before
                for job, (process, slot, started, before) in list(running.items()):
                    if process.poll() is None or received:  # what comes after a job may take minutes
                        continue
                    kill(process)  # what it leaves behind
                    del running[job]
                    free.append(slot)
                    if process.returncode == record.BUSY:
                        next_look[job] = time.monotonic() + SECONDS_TO_NEXT_LOOK
                        waiting.append(job)
                    else:
                        state, what = result(job, process.returncode, before)
                        if DEAD_WORKER in what and job not in retried:  # for want of memory, perhaps: once more
                            retried.add(job)
                            waiting.append(job)
                            record.note_failure(job.folder, what, record.STOPPED)  # another runner may take it, too
                            echo(f"{title}: {job}: {what}; it is run once more")
                            continue
                        note_end(job, state, f"{what}, {time.monotonic() - started:.0f} s")
                time.sleep(0.1)
        finally:
            if received and running:
                echo(f"{title}: asked {len(running)} jobs to stop, which save first; another signal kills them")
            end([process for process, *_ in running.values()], received)
    if received:
        number = received[0][0]
        echo(f"{title}: stopped by signal {number}; start it again to go on")
        raise SystemExit(128 + number)
    return {job: over[job] for job in jobs}


def exit_if_unfinished(states: dict, title: str) -> None:
    """Exit status 1, naming the jobs that did not finish, if there are any."""
    unfinished = [str(job) for job, state in states.items() if state != "finished"]
    if unfinished:
        raise SystemExit(f"{title}: {len(unfinished)} of {len(states)} jobs did not finish: {', '.join(unfinished)}")


def result(job: Job, status: int, before: bytes | None) -> tuple:
    """("finished", "failed" or "open", a line for the user) of a job whose process ended with `status`. before: its
    record at the start; a failure that came before the first update leaves it as it is."""
    if status < 0 or status >= 128 or status == record.STOPPED:
        number = -status if status < 0 else status - 128
        reason = "stopped by a signal" if status == record.STOPPED else f"killed by signal {number}"
        record.note_failure(job.folder, reason, status)
        return "open", f"{reason}; the next start runs it again"
    try:
        run = record.read(job.folder)
    except ValueError:
        run = None
    if status == 0 and run and run.state == "finished":
        return "finished", "{} {:.2f}".format(*run.best()) if run.metrics else "finished"
    if status == 0 and run and run.state == "stopped":
        reason = "stopped at its time limit"
        record.note_failure(job.folder, reason, record.STOPPED)
        return "open", f"{reason}; the next start runs it again"
    is_new = record.contents(job.folder) != before
    if is_new and run and run.state == "failed":
        reason = run.failure["reason"]
    else:
        reason = last_words(job) or f"exit status {status}" if status else "it ended before its run was finished"
        if is_new or not (run and run.started_at):  # else another run is in the folder, for example: it stays as it is
            record.note_failure(job.folder, reason, status)
    return "failed", f"FAILED ({reason}), see {job.log}"


def last_words(job: Job) -> str:
    """The last line that the last process of a job wrote into its log, cut; "" if it wrote none."""
    with suppress(OSError):
        lines = [line.strip() for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "$ ")
        return "" if last.startswith("$ ") else last[:200]
    return ""


def check(job: Job, slot: dict) -> None:
    """Let a job's command check its options, without running it, on the GPU that it will have. slot: see `slots`.
    Raises ValueError with the last line that it said."""
    command, environment = [*job.command, "--dry-run"], {**os.environ, **slot}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="backslashreplace", env=environment)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise ValueError(said.splitlines()[-1] if said else f"exit status {done.returncode}")


# ----------------------------------------------------------------------------------------------------------- processes


def start(job: Job, environment: dict) -> subprocess.Popen:
    """Start a job in a process group of its own; what it prints is added to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with job.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(job.command)}\n")
        log.flush()
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def end(processes: list, received: list) -> None:
    """Ask processes, and all that they started, to end; kill what is left after SECONDS_TO_END, or when the last of the
    signals that were received, (number, second), is another request than the first."""
    for process in processes:
        kill(process, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if received and received[-1][1] - received[0][1] > stop.ONE_REQUEST:
            break
        time.sleep(0.05)
    for process in processes:
        kill(process)
        process.wait()


def kill(process: subprocess.Popen, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group of a process, if anything of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
