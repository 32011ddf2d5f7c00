"""Many processes: as many at a time as there are slots, states by exit status and record, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from helpers import fork, has_ended, wait_until

from tupe.run import record, stop
from tupe.sweep import runner

STAND_IN = Path(__file__).parents[1] / "stand_in.py"
SLOT = [{"OMP_NUM_THREADS": "1"}]


def job(folder, behave=None, *options):
    """A job of the stand-in; behave: code that its process runs."""
    if behave:
        folder.mkdir(parents=True)
        (folder / "behave.py").write_text(behave)
    command = (sys.executable, str(STAND_IN), "finetune", f"--output={folder}", *options)
    return runner.Job(folder.name, folder, command)


def starts(*jobs):
    return [len((job.folder / "starts").read_text().split()) for job in jobs]


def quiet(line):
    pass


def test_jobs_run_at_most_as_many_at_a_time_as_there_are_slots(tmp_path):
    """Every process stays until another one has come, and notes how many there are."""
    behave = f"""
place = Path({str(tmp_path)!r})
mine = place / f"{{os.environ['SLOT']}}.now"
mine.touch()
deadline = time.time() + 60
while len(list(place.glob("*.now"))) < 2 and not (place / "met").exists() and time.time() < deadline:
    time.sleep(0.01)
(place / "met").touch()
with (place / "slots").open("a") as file:
    print(len(list(place.glob("*.now"))), os.environ["SLOT"], file=file)
time.sleep(0.2)
mine.unlink()
"""
    jobs = [job(tmp_path / f"job{n}", behave) for n in range(4)]
    states = runner.run(jobs, [{"SLOT": "a"}, {"SLOT": "b"}], echo=quiet)
    assert list(states.values()) == ["finished"] * 4 and starts(*jobs) == [1] * 4
    lines = (tmp_path / "slots").read_text().splitlines()
    assert {line.split()[1] for line in lines} == {"a", "b"} and max(int(line.split()[0]) for line in lines) == 2


def test_a_finished_job_is_not_run_again_and_its_log_is_kept(tmp_path):
    only, lines = job(tmp_path / "run", "print('of the process')"), []
    for _ in range(2):
        assert runner.run([only], SLOT, echo=lines.append) == {only: "finished"}
    assert starts(only) == [1]
    assert any("1/1 run: accuracy 51.00" in line for line in lines)
    first, *rest = only.log.read_text().splitlines()
    assert "stand_in.py finetune" in first and rest == ["of the process"]


FAILURES = {
    "own reason": ("run.end('out of memory', 3); run.save(folder); sys.exit(3)", "failed", ["out of memory"]),
    "no reason": ("sys.exit(2)", "failed", ["exit status 2"]),
    "not finished": ("run.save(folder); sys.exit(0)", "failed", ["before its run was finished"]),
    "at its time limit": ("run.state = 'stopped'; run.save(folder); sys.exit(0)", "open", ["time limit"]),
    "damaged": ("(folder / 'record.json').write_text('{'); sys.exit(1)", "failed", ["exit status 1"]),
    "killed": ("os.kill(os.getpid(), 9)", "open", ["killed by signal 9"]),
    "ended while it loaded": ("sys.exit(143)", "open", ["killed by signal 15"]),
}


@pytest.mark.parametrize("behave, state, reason", FAILURES.values(), ids=FAILURES)
def test_states_of_jobs_that_do_not_finish(tmp_path, behave, state, reason):
    """They stop no other job; a failed one is run again on request, a killed one with the next start."""
    bad, good, lines = job(tmp_path / "bad", behave), job(tmp_path / "good"), []
    assert runner.run([bad, good], SLOT, echo=lines.append) == {bad: state, good: "finished"}
    assert record.state_of(bad.folder) == state
    assert all(word in record.read(bad.folder).failure["reason"] for word in reason)
    assert any("1/2 bad: " in line and reason[0] in line and line.endswith(" left") for line in lines)
    with pytest.raises(SystemExit, match="1 of 2 jobs did not finish: bad"):
        runner.exit_if_unfinished({bad: state, good: "finished"}, "sweep")
    if state == "failed":
        runner.run([bad, good], SLOT, echo=quiet)
        assert starts(bad, good) == [1, 1]
    (bad.folder / "behave.py").unlink()
    states = runner.run([bad, good], SLOT, retry_failed=state == "failed", echo=quiet)
    assert set(states.values()) == {"finished"} and starts(bad, good) == [2, 1]
    assert record.read(bad.folder).failure is None


def test_a_job_whose_data_worker_died_is_run_once_more(tmp_path):
    """For want of memory, perhaps; what fails in another way is not."""
    behave = "import sys; sys.exit('RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.')"
    once = job(tmp_path / "once", f"if not (folder / 'again').exists(): (folder / 'again').touch(); {behave}")
    always = job(tmp_path / "always", behave)
    assert runner.run([once, always], SLOT, echo=quiet) == {once: "finished", always: "failed"}
    assert starts(once, always) == [2, 2]


def test_another_runner_takes_what_is_run_once_more(tmp_path):
    """The runner whose job lost its worker has others to do first; the second one finds it open."""
    dead = "sys.exit('RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.')"
    once = job(tmp_path / "once", f"if not (folder / 'again').exists(): (folder / 'again').touch(); {dead}")
    taken = []

    def see(line):
        if "once more" in line:
            taken.append(record.state_of(once.folder))
            taken.append(runner.run([once], SLOT, echo=quiet))

    assert runner.run([once], SLOT, echo=see) == {once: "finished"}
    assert taken == ["open", {once: "finished"}] and starts(once) == [2]


def test_a_refused_start_leaves_the_run_in_its_folder_as_it_is(tmp_path):
    """It was stopped half-way, and somebody starts the folder with other options."""
    half = job(tmp_path / "half", "run.save(folder); os.kill(os.getpid(), 9)")
    assert runner.run([half], SLOT, echo=quiet) == {half: "open"}
    (half.folder / "behave.py").write_text("print('it holds another run'); sys.exit(2)")
    lines = []
    assert runner.run([half], SLOT, echo=lines.append) == {half: "failed"}
    assert "FAILED (it holds another run), see" in lines[-1] and record.state_of(half.folder) == "open"
    for state in ("stopped", "failed"):
        record.Record(**{**vars(record.read(half.folder)), "state": state}).save(half.folder)
        before = record.contents(half.folder)
        for status in (1, 2, 3):
            (half.folder / "behave.py").write_text(f"sys.exit({status})")
            assert runner.run([half], SLOT, echo=lines.append, retry_failed=True) == {half: "failed"}
            assert f"FAILED (exit status {status})" in lines[-1] and record.contents(half.folder) == before
    record.note_failure(half.folder, "killed", -9)
    (half.folder / "behave.py").unlink()
    assert runner.run([half], SLOT, echo=quiet) == {half: "finished"}


def test_why_a_job_failed_is_the_last_line_of_its_log(tmp_path):
    behave = "print('many\\nlines'); print('--seed is -1; valid: 0 to 9', file=sys.stderr); sys.exit(2)"
    said = job(tmp_path / "said", behave)
    silent, lines = job(tmp_path / "silent", "sys.exit(2)"), []
    runner.run([said, silent], SLOT, echo=lines.append)
    assert f"FAILED (--seed is -1; valid: 0 to 9), see {said.log}" in lines[1] and "(exit status 2)" in lines[2]
    assert record.read(said.folder).failure == {"reason": "--seed is -1; valid: 0 to 9", "status": 2}


def test_a_job_of_another_process_is_waited_for(tmp_path, monkeypatch):
    """Its folder is locked when the runner looks, and a process finds it locked when it starts (exit status 75)."""
    monkeypatch.setattr(runner, "SECONDS_TO_NEXT_LOOK", 0.1)
    busy = job(tmp_path / "busy", "run.save(folder); time.sleep(1)")
    other = subprocess.Popen(busy.command)
    wait_until((busy.folder / "starts").exists)
    lines = []
    assert runner.run([busy], SLOT, echo=lines.append) == {busy: "finished"} and other.wait() == 0
    assert starts(busy) == [1] and "runs in another process" in lines[1]

    refused = job(tmp_path / "refused", "pass")
    (refused.folder / "busy").touch()
    threading.Timer(0.5, (refused.folder / "busy").unlink).start()
    assert runner.run([refused], SLOT, echo=quiet) == {refused: "finished"} and starts(refused) == [1]


def test_two_runners_share_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_TO_NEXT_LOOK", 0.1)
    jobs, states = [job(tmp_path / str(n), None, "--seconds=0.2") for n in range(4)], []
    threads = [threading.Thread(target=lambda: states.append(runner.run(jobs, SLOT, echo=quiet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(each.values()) for each in states] == [{"finished"}] * 2 and starts(*jobs) == [1] * 4


@pytest.mark.parametrize("retry", [False, True])
def test_what_failed_in_another_process_is_not_tried_again(retry, tmp_path, monkeypatch):
    """Unless it had failed before, and is to be tried once more."""
    monkeypatch.setattr(runner, "SECONDS_TO_NEXT_LOOK", 0.1)
    busy = job(tmp_path / "busy", "time.sleep(0.5); run.end('out of memory', 3); run.save(folder); sys.exit(3)")
    other = subprocess.Popen(busy.command)
    wait_until((busy.folder / "starts").exists)
    assert runner.run([busy], SLOT, echo=quiet, retry_failed=retry) == {busy: "failed"}
    other.wait()
    assert starts(busy) == [1]
    assert runner.run([busy], SLOT, echo=quiet, retry_failed=retry) == {busy: "failed"}
    assert starts(busy) == [2 if retry else 1]


STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# A process that starts another one; both want to live on when they are asked to end.
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])  # ignores SIGTERM, too
write_atomically(folder / "pids", f"{os.getpid()} {child.pid}")
"""


def start_runner(*jobs, patience=1):
    """A process that runs two jobs at a time, once the first two are under way; and all processes of these."""

    def run():
        runner.SECONDS_TO_END = patience
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)  # ignored where the tests run in the background
        with (folders[0].parent / "output").open("w") as file, redirect_stdout(file):
            runner.run(jobs, [{}] * 2)

    folders = [job.folder for job in jobs]
    process = fork(run, "sweep")
    wait_until(lambda: all((folder / "pids").exists() for folder in folders[:2]))
    return process, [int(pid) for folder in folders[:2] for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_that_was_started(tmp_path, number):
    jobs = [job(tmp_path / name, STUBBORN + "time.sleep(600)") for name in "ab"]
    process, pids = start_runner(*jobs, job(tmp_path / "c"))
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number and "start it again" in (tmp_path / "output").read_text()
    assert len(pids) == 4
    wait_until(lambda: all(map(has_ended, pids)))  # a signal needs a moment to kill
    assert [record.state_of(job.folder) for job in jobs] == ["open", "open"]
    assert not (tmp_path / "c" / "starts").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_jobs_have_time_to_save(tmp_path, number):
    """A training that is asked to end computes its pass to the end and saves, for minutes where the machine is busy."""
    assert runner.SECONDS_TO_END == 150
    save = """
def save(*signal):
    time.sleep(2)
    (folder / "saved").touch()
    os._exit(85)
signal.signal(signal.SIGTERM, save)
"""
    behave = STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", save) + "time.sleep(600)"
    jobs = [job(tmp_path / name, behave) for name in "ab"]
    process, pids = start_runner(*jobs, patience=runner.SECONDS_TO_END)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number and all((each.folder / "saved").exists() for each in jobs)
    wait_until(lambda: all(map(has_ended, pids)))


def test_a_second_signal_kills_jobs(tmp_path):
    """The first comes twice within a moment, as from a terminal and from a script that hands it on."""
    jobs = [job(tmp_path / name, STUBBORN + "time.sleep(600)") for name in "ab"]
    process, pids = start_runner(*jobs, patience=600)
    for pause in (0.1, stop.ONE_REQUEST):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(pause)
        assert not any(map(has_ended, pids))
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    wait_until(lambda: all(map(has_ended, pids)))


def test_a_runner_that_is_killed_leaves_processes_that_the_next_one_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_TO_NEXT_LOOK", 0.1)
    behave = "write_atomically(folder / 'pids', str(os.getpid())); time.sleep(2)"
    jobs = [job(tmp_path / name, behave) for name in "ab"] + [job(tmp_path / "c")]
    process, _ = start_runner(*jobs)
    process.kill()
    process.join()
    assert [record.state_of(each.folder) for each in jobs] == ["running", "running", "open"]
    assert set(runner.run(jobs, SLOT, echo=quiet).values()) == {"finished"} and starts(*jobs) == [1, 1, 1]


def test_what_a_process_leaves_behind_ends_with_it(tmp_path):
    only = job(tmp_path / "run", STUBBORN)
    assert runner.run([only], SLOT, echo=quiet) == {only: "finished"}
    process, child = map(int, (only.folder / "pids").read_text().split())
    wait_until(lambda: has_ended(child))


def test_an_error_in_the_caller_ends_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_TO_END", 0.5)
    jobs = [job(tmp_path / "slow", STUBBORN + "time.sleep(600)"), job(tmp_path / "quick")]

    def fail(job, state):
        wait_until((tmp_path / "slow" / "pids").exists)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        runner.run(jobs, SLOT * 2, on_done=fail, echo=quiet)
    pids = [int(pid) for pid in (tmp_path / "slow" / "pids").read_text().split()]
    wait_until(lambda: all(map(has_ended, pids)))  # a signal needs a moment to kill
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_job_is_checked_where_it_will_run(tmp_path, monkeypatch):
    """With its one GPU: a command splits its batch over all that it sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code = "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] if len(sys.argv) > 1 else 0)"
    job = runner.Job("one", tmp_path / "one", (sys.executable, "-c", code))
    with pytest.raises(ValueError, match="^2$"):
        runner.check(job, {"CUDA_VISIBLE_DEVICES": "2"})


def test_slots(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert runner.slots() == [{"OMP_NUM_THREADS": "8"}] and runner.slots(3) == [{"OMP_NUM_THREADS": "2"}] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.slots() == [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(4)] and len(runner.slots(2)) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # those that were allotted, no others
    assert runner.slots() == [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]
