"""Jobs of one machine: a process for each (fairseq keeps state between two runs of one process), a bounded number at a
time, and a record of why one failed."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from ..plugin.finetune import write_atomically


def slots(count=None):
    """Environments of the processes that may run at a time: one per GPU, or `count` (default 1) that share the threads
    which PyTorch would take (those of OMP_NUM_THREADS, or the cores that this process may use)."""
    import torch

    if count is not None and count < 1:
        raise ValueError(f"{count} jobs at a time; valid: 1 or more")
    gpus = torch.cuda.device_count()
    if gpus:
        allotted = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = allotted.split(",")[:gpus] if allotted else range(gpus)
        return [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in names][:count]
    count = count or 1
    return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}] * count


class Started(NamedTuple):
    process: subprocess.Popen
    log: Path
    offset: int  # where this process's part of the log begins
    time: float


def start(command, log, environment, folder=None):
    """Start a process that appends what it says to `log`."""
    with log.open("a") as out:
        offset = out.tell()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, cwd=folder
        )
    return Started(process, log, offset, time.time())


def run(waiting, slots, begin):
    """Runs every job of the deque `waiting`; yields (job, exit status, end of its log, seconds) whenever one ends.

    begin(job, environment): what `start` returns, or None if the job is not to be run now; it may put the job back into
    `waiting`, as may the caller. Closing the generator (`contextlib.closing`) stops the processes that still run.
    """
    free, running = list(slots), []
    try:
        while waiting or running:
            for _ in range(len(waiting)):
                if not free:
                    break
                job = waiting.popleft()
                if (begun := begin(job, free[-1])) is not None:
                    running.append((job, begun, free.pop()))
            for entry in [entry for entry in running if entry[1].process.poll() is not None]:
                job, begun, slot = entry
                running.remove(entry)
                free.append(slot)
                yield job, begun.process.returncode, tail_of(begun.log, begun.offset), time.time() - begun.time
            time.sleep(0.2 if running else 2.0 if waiting else 0)
    finally:
        for _, begun, _ in running:
            begun.process.terminate()
        for _, begun, _ in running:
            begun.process.wait()


def tail_of(path, offset, size=20000):
    """The end of what a log holds from `offset` on."""
    with path.open("rb") as file:
        file.seek(max(offset, path.stat().st_size - size))
        return file.read().decode("utf-8", errors="replace")


def record_failure(folder, returncode, tail, seconds):
    """Write failed.json; returns the reason. tail: end of the job's log."""
    reason = failure_reason(returncode, tail)
    failure = {"reason": reason, "killed": returncode < 0, "returncode": returncode, "seconds": round(seconds, 1)}
    write_atomically(Path(folder) / "failed.json", json.dumps(failure, indent=1) + "\n")
    return reason


def refused(tail):
    """Whether a job ended at once because another process trains in its folder. tail: end of the job's log."""
    lines = [line for line in tail.splitlines() if line.strip()]
    return any("another process is training in" in line for line in lines[-3:])


def failure_reason(returncode, tail):
    """One line that says why a job failed, from the end of its log."""
    text = tail.lower()
    if "out of memory" in text or "alloc_cpu" in text or "can't allocate memory" in text:
        return "out of memory"
    if "floatingpointerror" in text or "minimum loss scale reached" in text:
        return "diverged"
    if returncode < 0:
        return f"killed by signal {-returncode}"
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else f"exit status {returncode}"


def read_failure(folder):
    path = Path(folder) / "failed.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
