"""A few lines on the console, everything in the run's log, and an error as one line at the end."""

import logging
import re
import sys

import pytest
from helpers import ended, fork_tupe, write_data

from tupe.common import console
from tupe.run.folder import lock, unlock

SIMPLE = (
    "epoch 001:     50 / 90 loss=5.365, ppl=41.2, wps=238.3, ups=3.15, wpb=75.5, bsz=4, num_updates=50, lr=0.0009, "
)
SIMPLE += "gnorm=7.556, clip=100, train_wall=0, wall=1, left=0:00:04"


def test_lines_of_progress_become_rare(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.logged(tmp_path):
        lock(tmp_path)
        for number in range(100):
            clock[0] += 1
            logging.getLogger("train_inner").info(SIMPLE.replace("num_updates=50", f"num_updates={number}"))
    unlock(tmp_path)
    shown = [int(number) for number in re.findall(r"num_updates=(\d+),.* left", capsys.readouterr().out)]
    assert shown[:5] == [0, 1, 2, 3, 4] and shown[5:] == list(range(14, 100, 10))
    assert (tmp_path / "train.log").read_text().count("num_updates=") == 100


def test_a_traceback_is_in_the_log_once_there_is_one(tmp_path, capsys):
    def fail():
        try:
            raise RuntimeError("so it is")
        except RuntimeError:
            return console.keep_traceback()

    with console.logged(tmp_path):
        logging.getLogger("fairseq").info("before")
        assert fail() == "" and "Traceback" in capsys.readouterr().err
        lock(tmp_path)
        logging.getLogger("fairseq").info("x" * 8000)
        assert fail() == f"; see {tmp_path / 'train.log'}"
    unlock(tmp_path)
    said, log = capsys.readouterr(), (tmp_path / "train.log").read_text()
    assert "Traceback" in log and "RuntimeError: so it is" in log and "x" * 8000 in log and "| before\n" in log
    assert log.startswith("$ ") and "x" * 8000 not in said.out and len(said.out.splitlines()) == 1


def test_the_root_logger_is_as_before(capsys, tmp_path):
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    root.addHandler(handler)
    before = list(root.handlers), root.level
    try:
        with console.logged(tmp_path):
            assert handler not in root.handlers
            logging.getLogger("fairseq").info("unimportant")
            logging.getLogger("fairseq").warning("important")
        assert (sorted(root.handlers, key=id), root.level) == (sorted(before[0], key=id), before[1])
    finally:
        root.removeHandler(handler)
    said = capsys.readouterr()
    assert said.out.endswith("warning: important\n") and "unimportant" not in said.out and not said.err


def test_another_file_of_that_name_is_not_the_run_s_log(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    for folder, is_own in ((tmp_path / "run", True), (tmp_path, False)):
        with (folder / "train.log").open("w") as file:
            monkeypatch.setattr(console, "STDOUT", f"/proc/self/fd/{file.fileno()}")
            assert console.is_into_log(tmp_path / "run") == is_own


@pytest.mark.parametrize(("engine", "into_log"), [("fairseq", False), ("torch", True)])
def test_a_training_says_little(engine, into_log, tmp_path):
    """In a sweep, whose output is the run's log, nothing stands there twice."""
    pytest.importorskip(engine)
    run, data = tmp_path / "run", write_data(tmp_path / "data")
    words = ["pretrain", f"--engine={engine}", f"--data={data}", f"--output={run}", "--recipe=pretrain_small"]
    words += ["--arch=tupe_r_tiny", "--tokens-per-sample=24", "--max-update=3", "--warmup-updates=1"]
    words += ["--batch-size=4", "--num-workers=0", "--log-interval=1", "--allocator=none", "--gpus=0"]
    output = tmp_path / "output"
    if into_log:
        run.mkdir()
        output = run / "train.log"
    status = ended(fork_tupe(*words, log=output))
    shown, log = output.read_text().splitlines(), (run / "train.log").read_text()
    assert status == 0, shown[-5:]
    assert log.count("update 1") + log.count("num_updates=1,") + log.count("num_updates=1 ") == 1
    assert ("'_name': 'tupe_masked_lm'" in log) == (engine == "fairseq")
    assert log.startswith("$ ") != into_log
    if not into_log:
        assert len(shown) <= 16 and max(map(len, shown)) <= 200
        lines = [line for line in shown if " left" in line and "on this machine" not in line]  # of progress
        assert len(lines) == 3 and "the whole log is in" in shown[0]
