"""Worker processes: they end with their parent, with a signal, and when one of them is killed."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import click
import pytest
from helpers import descendants, ended, fork, has_ended, print_into, wait_until

from tupe.common.options import Command, ended_by_signals
from tupe.run import processes


def in_a_copy(target, seconds=30):
    """Run `target` in a copy of this process; returns its exit status, None if it does not end."""
    process = fork(target, "test")
    process.join(seconds)
    tree, ended = descendants(process.pid), process.exitcode
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ended


@pytest.mark.thorough
def test_workers_that_have_hardly_begun_end_all_the_same():
    """While a command handles SIGTERM, a worker that is being forked would not notice one."""

    def target():
        with ended_by_signals():
            for _ in range(20):
                with processes.workers(2) as pool:
                    assert list(pool.map(abs, [-1])) == [1]

    assert in_a_copy(target) == 0


def test_an_exception_of_a_task_is_that_of_the_caller():
    with pytest.raises(ValueError, match="invalid literal"), processes.workers(2) as pool:
        list(pool.map(int, ["1", "one", "2"]))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_worker_is_left_after_an_error(error):
    """Nor does a process that multiprocessing has started wait for it for ever, at its end."""

    def target():
        try:
            with processes.workers(2) as pool:
                pool.submit(time.sleep, 1)
                pool.submit(int, "1").result()
                raise error
        except error:
            sys.exit(2 if len(descendants(os.getpid())) == 1 else 3)

    assert in_a_copy(target) == 2


def test_a_signal_ends_the_workers(tmp_path):
    def target():
        with ended_by_signals(), processes.workers(2) as pool:
            futures = [pool.submit(time.sleep, 600) for _ in range(9)]
            (tmp_path / "begun").touch()
            futures[0].result()

    process = fork(target, "test")
    wait_until((tmp_path / "begun").exists)
    wait_until(lambda: len(descendants(process.pid)) == 3)
    tree = descendants(process.pid)
    process.terminate()
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM
    wait_until(lambda: all(has_ended(pid) for pid in tree))


def die_with_the_lock():
    """Like a worker that is killed while it sends a result."""
    sys._getframe(1).f_locals["result_queue"]._wlock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_it_sends_a_result_does_not_block_the_others():
    def target():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as the command does
        with pytest.raises(concurrent.futures.BrokenExecutor), processes.workers(2) as pool:
            pool.submit(time.sleep, 600)
            pool.submit(die_with_the_lock).result()

    assert in_a_copy(target) == 0


def test_every_worker_leaves_ctrl_c_to_its_parent():
    with processes.workers(2) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN


def test_ctrl_c_is_one_line_of_a_command_with_workers(tmp_path):
    @click.command(cls=Command)
    def wait():
        with processes.workers(2) as pool:
            future = pool.submit(time.sleep, 600)
            (tmp_path / "begun").touch()
            future.result()

    def run():
        os.setsid()
        print_into(tmp_path / "log")
        wait([], "wait")

    process = fork(run)
    wait_until((tmp_path / "begun").exists)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert ended(process) == 128 + signal.SIGINT and (tmp_path / "log").read_text() == "wait: interrupted\n"


def test_training_takes_as_many_open_files_as_it_may_and_needs_some():
    """With too few, PyTorch's data workers repeat an error for ever."""

    def check(soft, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            processes.prepare_for_data_workers()
        except ValueError as error:
            assert f"allows {hard} open files" in str(error) and "ulimit -n 1024" in str(error)
            os._exit(3)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard

    assert ended(fork(lambda: check(64, 512))) == 0
    assert ended(fork(lambda: check(24, 24))) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["fairseq", "torch"])
def test_a_run_leaves_nothing_in_the_folder_of_temporary_files(engine, vocabulary, tmp_path):
    if engine == "fairseq":
        pytest.importorskip("fairseq")
    words = ["--engine", engine, "--data", vocabulary, "--output", tmp_path / "run", "--arch=bert_a_tiny", "--gpus=0"]
    words += ["--recipe=pretrain_small", "--tokens-per-sample=20", "--max-update=2", "--num-workers=2"]
    command = [*processes.PROGRAM, "pretrain", *map(str, words)]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "TMPDIR": folder}, timeout=240)
        left = os.listdir(folder)
    assert [name for name in left if not name.startswith("torchinductor")] == []  # which PyTorch keeps for the next


def test_a_folder_of_temporary_files_with_a_long_path_is_refused(tmp_path, monkeypatch):
    """Data workers would not be heard: the path of a socket in it is too long."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))
    with pytest.raises(ValueError, match="export TMPDIR=/tmp"):
        processes.prepare_for_data_workers()
