"""Processes of one machine, and the reasons of failures."""

import sys
from collections import deque
from contextlib import closing

import pytest
import torch

from tupe.experiments import runner as jobs
from tupe.experiments.runner import failure_reason, slots


def python(code):
    return [sys.executable, "-c", code]


def test_jobs_run_at_most_as_many_at_a_time_as_there_are_slots(tmp_path):
    """Every process notes its slot when it begins, and ends once there was one in the other slot; a job that is not
    ready comes back later."""
    code = f"""
import os, pathlib, time
folder, slot = pathlib.Path({str(tmp_path)!r}), os.environ["SLOT"]
print("in", slot, flush=True)
(folder / slot).touch()
other = folder / {{"a": "b", "b": "a"}}[slot]
until = time.time() + 60
time.sleep(0.3)
while not other.exists() and time.time() < until:
    time.sleep(0.01)
print("out", flush=True)
"""
    log, postponed, waiting = tmp_path / "log", [], deque(range(5))

    def begin(job, environment):
        if job == 0 and not postponed:
            postponed.append(job)
            waiting.append(job)
            return None
        return jobs.start(python(code), log, environment)

    ended = list(jobs.run(waiting, [{"SLOT": "a"}, {"SLOT": "b"}], begin))
    assert sorted(job for job, *_ in ended) == list(range(5)) and postponed == [0]
    assert all(returncode == 0 and seconds > 0.2 for _, returncode, _, seconds in ended)
    at_work, most = 0, 0
    for line in log.read_text().splitlines():
        at_work += 1 if line.startswith("in") else -1
        most = max(most, at_work)
    assert most == 2 and {"in a", "in b"} <= set(log.read_text().splitlines())


def test_result_holds_the_status_and_this_process_s_part_of_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")

    def begin(job, environment):
        return jobs.start(python("import os; print(os.getcwd()); raise SystemExit(3)"), log, environment, tmp_path)

    ((job, returncode, tail, _),) = jobs.run(deque(["x"]), [{}], begin)
    assert (job, returncode, tail) == ("x", 3, f"{tmp_path}\n")
    assert log.read_text().startswith("of an earlier start\n")


def test_closing_stops_what_runs(tmp_path):
    started = []

    def begin(job, environment):
        started.append(jobs.start(python(f"import time; time.sleep({job})"), tmp_path / "log", environment))
        return started[-1]

    with pytest.raises(KeyboardInterrupt), closing(jobs.run(deque([60, 0]), [{}, {}], begin)) as results:
        for _ in results:
            raise KeyboardInterrupt
    assert started[0].process.returncode == -15


def test_slots(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert slots() == [{"OMP_NUM_THREADS": "8"}] and slots(3) == [{"OMP_NUM_THREADS": "2"}] * 3
    for count in (0, -1):  # without slots, `run` would wait for ever
        with pytest.raises(ValueError, match=f"{count} jobs at a time; valid: 1 or more"):
            slots(count)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots() == [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(4)] and len(slots(2)) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # those that were allotted, no others
    assert slots() == [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]


def test_failure_reasons():
    assert (
        failure_reason(1, "...\nRuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator") == "out of memory"
    )
    assert failure_reason(-15, "") == "killed by signal 15"
    assert failure_reason(1, "Traceback\n  File x\nValueError: wrong\n\n") == "ValueError: wrong"
    assert failure_reason(3, "") == "exit status 3"
