"""What a command writes: whole or not at all, and by one process at a time."""

import os
import shutil
import signal
import subprocess
import sys
import time

import click
import pytest
import torch
from click.testing import CliRunner
from helpers import PLUGIN, descendants, ended, fork, has_ended, wait_until

from tupe.common import options
from tupe.run import folder, record
from tupe.run.folder import files_below, is_locked, lock, owned, unlock, write_together, written


def test_fingerprints(tmp_path):
    def of(content, name="a", **more):
        (tmp_path / name).write_bytes(content)
        return folder.fingerprint([tmp_path / name, *more.values()])

    large = bytes(folder.SAMPLES * folder.SAMPLE) * 3
    contents = [b"", b"abc", b"abd", large, large[:-1] + b"x", b"x" + large[1:], large + b"\0"]
    prints = [of(content) for content in contents]
    assert len(set(prints)) == len(prints) and all(len(print) == 12 for print in prints)
    assert of(b"abc", "b") == of(b"abc")  # whatever its name
    assert of(b"abc", more=tmp_path / "b") != of(b"abc")
    # Of several large files each has a share of what is read.
    paths = [tmp_path / f"{n}" for n in range(100)]
    for path in paths[:3]:
        path.write_bytes(large)
    for path in paths[3:]:
        path.write_bytes(b"")
    before = folder.fingerprint(paths)
    paths[1].write_bytes(large[: len(large) // 2] + b"x" * (len(large) // 2))
    assert folder.fingerprint(paths) != before != folder.fingerprint(reversed(paths))


def test_damage_is_seen_without_torch(tmp_path):
    torch.save({"a": torch.zeros(2000)}, tmp_path / "whole.pt")
    content, middle = (tmp_path / "whole.pt").read_bytes(), 4000
    files = {
        "cut.pt": content[:middle], "cut at the end.pt": content[:-1], "empty.pt": b"",
        "one bit.pt": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "half of it zeros.pt": content[:middle] + bytes(len(content) - middle),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    shutil.make_archive(str(tmp_path / "other"), "zip", PLUGIN / "evaluate")
    script = "import sys; from tupe.run.folder import damage_in\n"
    script += "for path in sys.argv[1:]: print(damage_in(path))\n"
    script += "assert 'torch' not in sys.modules"
    names = ["whole.pt", *files, "other.zip", "", "missing"]
    words = [sys.executable, "-c", script, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PLUGIN.parent)
    said = dict(zip(names, done.stdout.splitlines(), strict=True))
    assert [name for name in names if said[name] == "None"] == ["whole.pt"], said
    assert "wrong checksum" in said["one bit.pt"]


def test_links_are_followed_and_hidden_files_left_out(tmp_path):
    for name in ("data/a.txt", "data/.git/b.txt", "data/.c.txt", "other/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "nowhere").symlink_to(tmp_path / "none")
    found = [str(path.relative_to(tmp_path / "data")) for path in files_below(tmp_path / "data")]
    assert found == ["a.txt", "link/d.txt", "nowhere"]


def test_a_run_has_one_process_at_a_time(tmp_path):
    """The lock is its process's until that ends, however it ends, and not that of its data workers."""

    def run():
        assert lock(tmp_path)
        fork(lambda: time.sleep(60))
        (tmp_path / "begun").touch()
        time.sleep(60)

    other = fork(run)
    wait_until((tmp_path / "begun").exists)
    assert not lock(tmp_path) and is_locked(tmp_path)
    _, copy = descendants(other.pid)
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: has_ended(other.pid))
    assert not is_locked(tmp_path) and lock(tmp_path) and not has_ended(copy)
    os.kill(copy, signal.SIGKILL)
    assert lock(tmp_path)  # one's own
    unlock(tmp_path)
    assert not is_locked(tmp_path)


def test_files_written_together_replace_none(tmp_path, monkeypatch):
    for name in ("README.md", "dict.txt", "same"):
        (tmp_path / name).write_text("theirs")
    files = {"same": "theirs", "new": b"ours", "README.md": "ours", "dict.txt": b"ours"}
    with pytest.raises(ValueError, match=r"^README\.md, dict\.txt exist already in .*; choose another folder or "):
        write_together(tmp_path, files)
    assert not (tmp_path / "new").exists() and {path.read_text() for path in tmp_path.iterdir()} == {"theirs"}

    def fail_at_more(path, content):
        if path.name == "more":
            raise OSError("full")
        path.write_bytes(content)

    monkeypatch.setattr(folder, "write_atomically", fail_at_more)
    for place in (tmp_path, tmp_path / "new"):
        with pytest.raises(OSError, match="full"):
            write_together(place, {"same": "theirs", "new": b"ours", "more": "ours"})
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "dict.txt", "same"}


def test_of_two_that_write_one_folder_at_once_one_wins(tmp_path, monkeypatch):
    """And what one left that was killed is deleted."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.7.partial").touch()

    def write(path, content):
        time.sleep(0.5)
        path.touch()

    monkeypatch.setattr(folder, "write_atomically", write)
    processes = [fork(lambda: write_together(tmp_path / "out", {"model": ""}), "tupe") for _ in range(2)]
    assert sorted(ended(process) == 0 for process in processes) == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_a_file_has_one_writer_but_a_command_may_be_made_of_parts(tmp_path):
    with owned(tmp_path / "a.pt"), owned(tmp_path / "a.pt"), owned(tmp_path / "b.pt"):
        with written(tmp_path / "a.pt") as file:
            file.write(b"mine")

        def refused():
            with (
                pytest.raises(BlockingIOError, match="another process is writing .*/a.pt; wait for it"),
                owned(tmp_path / "a.pt"),
            ):
                pass

        assert ended(fork(refused)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"] and (tmp_path / "a.pt").read_bytes() == b"mine"


def test_files_of_other_programs_that_end_as_ours_stay(tmp_path):
    theirs = [tmp_path / "out" / "movie.mkv.partial", tmp_path / "out.csv.partial", tmp_path / "out.png.7.partial"]
    ours = [tmp_path / "out.7.partial", *(tmp_path / "out" / f"{name}.partial" for name in ("a.7", f".b.{'0' * 32}"))]
    (tmp_path / "out").mkdir()
    for path in (*theirs, *ours):
        path.touch()
    with owned(tmp_path / "out"):
        assert [path.exists() for path in (*theirs, *ours)] == [True] * 3 + [False] * 3


def test_a_folder_whose_parent_is_another_s_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(folder.os, "access", lambda path, mode: path != tmp_path)
    with owned(tmp_path / "out"):
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert ended(fork(lambda: owned(tmp_path / "out").__enter__())) != 0
    assert not list((tmp_path / "out").iterdir())


def test_what_a_training_is_writing_stays(tmp_path):
    """A command may write its report into the folder of a run."""
    (tmp_path / "run" / "checkpoint-3.partial").mkdir(parents=True)
    lock(tmp_path / "run")
    with owned(tmp_path / "run"):
        assert (tmp_path / "run" / "checkpoint-3.partial").exists()
    unlock(tmp_path / "run")
    with owned(tmp_path / "run"):
        assert not (tmp_path / "run" / "checkpoint-3.partial").exists()


@pytest.mark.parametrize("shared", [False, True])
def test_a_command_is_the_only_one_that_writes_its_output(shared, tmp_path):
    """But for those that train in a folder of runs."""

    @click.command(cls=options.Command)
    @options.output("The folder.", shared=shared)
    def write(output):
        click.echo("wrote")

    def hold():
        with owned(tmp_path / "out"):
            (tmp_path / "begun").touch()
            time.sleep(60)

    other = fork(hold)
    wait_until((tmp_path / "begun").exists)
    first = CliRunner().invoke(write, [f"--output={tmp_path / 'out'}"])
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert first.exit_code == (0 if shared else record.BUSY)
    assert CliRunner().invoke(write, [f"--output={tmp_path / 'out'}"]).stdout == "wrote\n"
