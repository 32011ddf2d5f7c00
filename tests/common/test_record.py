"""The record of a run: what it says, states of a folder, locks, atomic writes."""

import functools
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ended, fork

from tupe.common import record
from tupe.common.record import Record, clear_failure, git_commit, note_failure, read, state_of, write_together


def some_run(**changes):
    facts = {"task": "CoLA", "architecture": "tupe_r", "seed": 1, "lr": 2e-5, "budget": {"max_epoch": 3}}
    facts.update(splits=["valid"], metrics=["matthews", "accuracy"], pretrained="c.pt")
    return Record(**{**facts, **changes})


def scored(*values):
    """Records' scores with a new best whenever a value is as high as any before it."""
    return [
        {"epoch": i + 1, "num_updates": 4 * (i + 1), "split": "valid", "matthews": v, "best": v >= max(values[: i + 1])}
        for i, v in enumerate(values)
    ]


def test_a_record_reads_as_it_was_written(tmp_path):
    run = some_run(scores=scored(0.1 + 0.2, 1 / 3))
    run.begin("CPU")
    run.save(tmp_path)
    assert read(tmp_path) == run and read(tmp_path).best() == ("matthews", 1 / 3)
    assert run.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert not list(tmp_path.glob("*.partial"))
    assert read(tmp_path / "nothing") is None


def test_what_tells_two_runs_apart():
    assert some_run().differences(some_run(command="other", device="GPU", scores=scored(1.0))) == {}
    assert some_run().differences(some_run(seed=2, budget={"max_epoch": 5})) == {
        "seed": (2, 1), "budget": ({"max_epoch": 5}, {"max_epoch": 3}),
    }  # fmt: skip
    scratch = {"pretrained": None, "metrics": []}
    assert some_run(**scratch).differences(some_run(**scratch, budget={"max_update": 9})) == {}


def test_settings_tell_two_runs_apart():
    def differences(old, new, **more):
        return some_run(config=new, **more).differences(some_run(config=old))

    assert differences({"model.dropout": 0}, {"model.dropout": 0}) == {}
    assert differences({"model.dropout": 0}, {}) == {"model.dropout": (0, None)}
    assert differences({}, {"task.mask_prob": 0.5}) == {"task.mask_prob": (None, 0.5)}
    assert differences({}, {"dataset.num_workers": 0, "checkpoint.no_save": True}) == {}
    assert some_run(config={}, data="a").differences(some_run(config={}, data="b")) == {"data": ("b", "a")}
    decay = {"lr_scheduler.total_num_update": 9, "lr_scheduler.cooldown_updates": 2}
    scratch = {"pretrained": None, "metrics": []}
    run = some_run(**scratch, config={}, budget={"max_update": 5})
    assert some_run(**scratch, config=decay, budget={"max_update": 5}).differences(run).keys() == decay.keys()
    assert some_run(**scratch, config=decay, budget={"max_update": 9}).differences(run) == {}


def test_what_changes_when_a_run_is_resumed_is_noted():
    earlier = some_run(config={"dataset.num_workers": 2, "model.dropout": 0}, data="a", dictionary="b", command="x")
    earlier.pretrained_weights, earlier.started_at = "c", "yesterday"
    run = some_run(**{**vars(earlier), "config": {"model.dropout": 0}, "device": "GPU", "command": "y"})
    run.go_on(earlier, 60)
    change = {"num_updates": 60, "dataset.num_workers": [2, None], "command": ["x", "y"], "device": ["", "GPU"]}
    assert run.changes == [change] and run.started_at == "yesterday"
    again = some_run(**vars(run))
    again.go_on(run, 80)
    assert again.changes == [change]  # nothing more


def test_fingerprints(tmp_path):
    def of(content, name="a", **more):
        (tmp_path / name).write_bytes(content)
        return record.fingerprint([tmp_path / name, *more.values()])

    large = bytes(record.SAMPLES * record.SAMPLE) * 3
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
    before = record.fingerprint(paths)
    paths[1].write_bytes(large[: len(large) // 2] + b"x" * (len(large) // 2))
    assert record.fingerprint(paths) != before != record.fingerprint(reversed(paths))


def test_electras_loss_is_not_that_of_a_masked_language_model():
    assert Record(task="masked_lm").loss_unit != Record(task="electra").loss_unit
    assert Record(task="electra").loss_unit.startswith("nats")


def test_states_of_a_folder(tmp_path):
    assert state_of(tmp_path / "none") == state_of(tmp_path) == "open"
    run = some_run()
    run.begin()
    run.save(tmp_path)
    assert state_of(tmp_path) == "open"  # begun, but no process is there: it was killed
    assert record.lock(tmp_path) and state_of(tmp_path) == "running"
    run.end()
    run.save(tmp_path)
    assert state_of(tmp_path) == "running"  # its checkpoint is written after its scores
    record.unlock(tmp_path)
    assert state_of(tmp_path) == "finished" and run.finished_at
    run.end("diverged: loss nan")
    run.save(tmp_path)
    assert state_of(tmp_path) == "failed" and read(tmp_path).failure == {"reason": "diverged: loss nan", "status": 1}
    run.started_at = first = "2020-01-01 00:00:00+0000"
    run.begin()  # again
    assert (run.started_at, run.finished_at, run.failure, run.state) == (first, None, None, "running")


@pytest.mark.parametrize("content", ['{"task": "CoLA"', '{"task": "CoLA", "seed": ', "[1]]", "[]"])
def test_half_a_record_is_an_open_run(content, tmp_path):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="record.json is not a run record"):
        read(tmp_path)
    assert state_of(tmp_path) == "open"


def test_failures_that_a_process_could_not_record_itself(tmp_path):
    note_failure(tmp_path, "no such file", 2)
    assert state_of(tmp_path) == "failed" and read(tmp_path).failure == {"reason": "no such file", "status": 2}
    clear_failure(tmp_path)
    assert state_of(tmp_path) == "open" and read(tmp_path).state == "stopped"
    note_failure(tmp_path, "killed by signal 9", -9)
    assert state_of(tmp_path) == "open" and read(tmp_path).failure["status"] == -9
    finished = some_run()
    finished.end()
    finished.save(tmp_path)
    note_failure(tmp_path, "another run was refused", 2)
    assert state_of(tmp_path) == "finished"


def test_one_process_at_a_time(tmp_path):
    """The lock is its process's until that ends, however it ends."""
    code = f"from tupe.common import record; print(record.lock({str(tmp_path)!r}), flush=True); input()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **options) as other:
        assert other.stdout.readline() == "True\n"
        assert not record.lock(tmp_path) and record.is_locked(tmp_path)
        other.kill()
    assert not record.is_locked(tmp_path) and record.lock(tmp_path)
    assert record.lock(tmp_path)  # one's own
    record.unlock(tmp_path)
    assert not record.is_locked(tmp_path)


def test_a_record_holds_no_nan(tmp_path):
    run = some_run(scores=scored(0.5))
    run.save(tmp_path)
    before = record.contents(tmp_path)
    run.scores[0]["matthews"] = float("nan")
    with pytest.raises(ValueError, match="record.json would not be JSON"):
        run.save(tmp_path)
    assert record.contents(tmp_path) == before


def test_files_written_together_replace_none(tmp_path):
    for name in ("README.md", "dict.txt", "same"):
        (tmp_path / name).write_text("theirs")
    files = {"same": "theirs", "new": b"ours", "README.md": "ours", "dict.txt": b"ours"}
    with pytest.raises(ValueError, match=r"^README\.md, dict\.txt exist already in .*; choose another folder or "):
        write_together(tmp_path, files)
    assert not (tmp_path / "new").exists() and {path.read_text() for path in tmp_path.iterdir()} == {"theirs"}

    def fail(path):
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_together(tmp_path, {"same": "theirs", "new": b"ours", "more": fail})
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "dict.txt", "same"}


def test_of_two_that_write_one_folder_at_once_one_wins(tmp_path):
    """And what one left that was killed is deleted."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.7.partial").touch()

    def write(path, content):
        time.sleep(0.3)
        path.write_text(content)

    def start(content):
        files = {"config.json": content, "model": functools.partial(write, content=content)}
        return fork(lambda: write_together(tmp_path / "out", files), "tupe")

    processes = [start(content) for content in ("first", "second")]
    assert sorted(ended(process) == 0 for process in processes) == [False, True]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    (content,) = {path.read_text() for path in (tmp_path / "out").iterdir()}
    assert content in ("first", "second")


def test_the_commit_is_that_of_this_source_alone(tmp_path, monkeypatch):
    """Not of a project in whose folder tupe is installed."""
    if not (Path(record.__file__).parents[2] / ".git").exists():
        pytest.skip("not a checkout")
    assert git_commit()
    for words in (["init", "-q"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-mx"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "record.py").touch()
    monkeypatch.setattr(record, "__file__", str(tmp_path / "lib" / "record.py"))
    assert git_commit() is None


def test_an_update_may_be_divided_otherwise():
    """As many sequences are the same run; more of them, or batches of so many tokens, are another."""

    def differs(there, here, **more):
        configs = ({**dict(zip(names, pair, strict=True)), **more} for pair in (there, here))
        one, two = (Record("masked_lm", config=config) for config in configs)
        return set(two.differences(one))

    names = ["dataset.batch_size", "optimization.update_freq"]
    assert differs((16, [8]), (32, [4])) == differs((16, [2, 4]), (8, [4, 8])) == set()
    assert differs((16, [8]), (32, [8])) == {names[0]} and differs((16, [2, 4]), (8, [4, 4])) == set(names)
    assert differs((16, [8]), (32, [4]), **{"dataset.max_tokens": 99}) == set(names)
    assert differs((None, [8]), (None, [4])) == {names[1]}
