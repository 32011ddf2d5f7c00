"""Checkpoints that cannot be half."""

import errno
import os
import shutil
import subprocess
import sys

import pytest
from helpers import PLUGIN, ended, file_system, fork, load, pretrain_arguments, train

from tupe.common.record import corruption_in, read, state_of, write_atomically
from tupe.plugin import saving, worker
from tupe.plugin.masked_lm import TupeMaskedLMTask


def arguments(data, folder, *more):
    often = ["--save-interval-updates=4", "--num-workers=0", "--disable-validation"]
    return pretrain_arguments(data, folder, *often, *more)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(arguments(data, folder))


def test_damage_is_seen_without_torch(whole, tmp_path):
    content = (whole[0] / "checkpoint_last.pt").read_bytes()
    middle = len(content) // 2
    files = {
        "whole": content, "cut": content[:middle], "cut at the end": content[:-1], "empty": b"",
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "half of it zeros": content[:middle] + bytes(len(content) - middle),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    shutil.make_archive(str(tmp_path / "other"), "zip", PLUGIN / "evaluate")
    script = "import sys; from tupe.common.record import corruption_in\n"
    script += "for path in sys.argv[1:]: print(corruption_in(path))\n"
    script += "assert 'torch' not in sys.modules"
    paths = [*(tmp_path / name for name in files), tmp_path / "other.zip", tmp_path, tmp_path / "missing"]
    words = [sys.executable, "-c", script, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PLUGIN.parent)
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and first == "None" and len(others) == len(paths) - 1, done.stderr
    assert "None" not in others and "wrong checksum" in others[3]


@pytest.mark.parametrize("when", ["writing", "copying"])
def test_a_kill_while_saving_leaves_the_last_checkpoint(data, whole, tmp_path, monkeypatch, when):
    """The file that is resumed from is at no moment a part of one; what was begun is gone after the next start."""

    class Killed(BaseException):
        pass

    def half(source, file, *_):
        content = (whole[0] / "checkpoint_last.pt").read_bytes()
        file.write(content[: len(content) // 2])
        raise Killed

    train(arguments(data, tmp_path, "--max-update=4", "--total-num-update=14"))
    module, name = (saving.torch, "save") if when == "writing" else (saving.shutil, "copyfileobj")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, half)
        train(arguments(data, tmp_path))
    assert corruption_in(tmp_path / "checkpoint_last.pt") is None and len(list(tmp_path.glob("*.tmp"))) == 1
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4
    assert train(arguments(data, tmp_path)) == whole[1][4:] and not list(tmp_path.glob("*.tmp"))


def test_two_processes_may_write_the_same_file(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    with saving.written_whole(tmp_path / "x.pt") as file:
        file.write(b"mine")
        assert ended(fork(lambda: saving.copy(tmp_path / "other", tmp_path / "x.pt"), "x")) == 0
        assert (tmp_path / "x.pt").read_bytes() == b"other"
    assert (tmp_path / "x.pt").read_bytes() == b"mine" and not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MB, about six of these checkpoints."""
    with file_system(tmp_path / "disk", 40) as folder:
        yield folder


def test_a_full_disk_stops_the_run_and_harms_no_checkpoint(data, whole, small_disk):
    folder, filler = small_disk / "run", small_disk / "filler"
    updates = iter(range(1, 100))

    def fill(samples):
        if next(updates) == 7:
            free = shutil.disk_usage(small_disk).free
            filler.write_bytes(bytes(free - 2**20))

    with pytest.raises(ValueError, match=r"_1_8\.pt .*the disk is full"):
        train(arguments(data, folder), fill)
    assert corruption_in(folder / "checkpoint_last.pt") is None and not list(folder.glob("*.tmp"))
    assert state_of(folder) == "failed" and "the disk is full" in read(folder).failure["reason"]
    os.unlink(filler)
    assert train(arguments(data, folder)) == whole[1][4:] and state_of(folder) == "finished"


def test_a_full_disk_is_one_line_wherever_it_is_noticed(data, tmp_path, monkeypatch, capfd):
    """Here by the record or the predictions of a validation."""

    def full(task, split, best):
        (tmp_path / f"scores.{os.getpid()}.partial").symlink_to("/dev/full")
        write_atomically(tmp_path / "scores", "0.5")

    monkeypatch.setattr(TupeMaskedLMTask, "keep_predictions", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/scores'") as caught:
        words = pretrain_arguments(data, tmp_path / "run", "--num-workers=0", "--max-update=2")
        worker.train(worker.parsed(words))
    assert caught.value.errno == errno.ENOSPC and "Traceback" not in "".join(capfd.readouterr())
    assert state_of(tmp_path / "run") == "failed" and "No space left" in read(tmp_path / "run").failure["reason"]
