"""Checkpoints that cannot be half."""

import errno
import os
import shutil

import pytest
from helpers import file_system, load, parsed, pretrain_arguments, train

from tupe.plugin import launch, saving
from tupe.plugin.masked_lm import TupeMaskedLMTask
from tupe.run.folder import damage_in, write_atomically
from tupe.run.record import read, state_of


def arguments(data, folder, *more):
    often = ["--save-interval-updates=4", "--num-workers=0", "--disable-validation"]
    return pretrain_arguments(data, folder, *often, *more)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(arguments(data, folder))


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
    assert damage_in(tmp_path / "checkpoint_last.pt") is None
    (tmp_path / "checkpoint_last.pt.7.partial").touch()  # as a process leaves it that cannot clean up
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4
    assert train(arguments(data, tmp_path)) == whole[1][4:] and not list(tmp_path.glob("*.partial"))


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

    with pytest.raises(OSError, match=r"No space left on device: .*_1_8\.pt"):
        train(arguments(data, folder), fill)
    assert damage_in(folder / "checkpoint_last.pt") is None and not list(folder.glob("*.partial"))
    assert state_of(folder) == "failed" and "No space left" in read(folder).failure["reason"]
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
        launch.train(parsed(words))
    assert caught.value.errno == errno.ENOSPC and "Traceback" not in "".join(capfd.readouterr())
    assert state_of(tmp_path / "run") == "failed" and "No space left" in read(tmp_path / "run").failure["reason"]
