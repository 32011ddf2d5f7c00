"""The record of a run: what it says, states of a folder, locks, atomic writes."""

import subprocess
import sys

import pytest

from tupe import record
from tupe.record import Record, clear_failure, note_failure, read, state_of


def some_run(**changes):
    facts = {"task": "CoLA", "architecture": "tupe_r", "seed": 1, "lr": 2e-5, "length": {"max_epoch": 3}}
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
    assert run.started_at and run.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert not list(tmp_path.glob("*.partial"))
    assert read(tmp_path / "nothing") is None


def test_what_tells_two_runs_apart():
    assert some_run().differences(some_run(command="other", device="GPU", scores=scored(1.0))) == {}
    assert some_run().differences(some_run(seed=2, length={"max_epoch": 5})) == {
        "seed": (1, 2), "length": ({"max_epoch": 3}, {"max_epoch": 5}),
    }  # fmt: skip
    scratch = {"pretrained": None, "metrics": []}
    assert some_run(**scratch).differences(some_run(**scratch, length={"max_update": 9})) == {}
    # after the classes of a position file have changed their order
    one, same, other = (f"cls zero, position {name}, segments learned" for name in ("aa+bb:x:1", "bb:x:1+aa", "aa+bb"))
    assert some_run(variant=one).differences(some_run(variant=same)) == {}
    assert some_run(variant=one).differences(some_run(variant=other)) == {"variant": (one, other)}


def test_electras_loss_is_not_that_of_a_masked_language_model():
    assert Record(task="masked_lm").loss_unit == Record(task="masked_lm_next_sentence").loss_unit
    assert Record(task="electra").loss_unit.startswith("nats")


def test_states_of_a_folder(tmp_path):
    assert state_of(tmp_path / "none") == state_of(tmp_path) == "open"
    run = some_run()
    run.begin()
    first = run.started_at
    run.save(tmp_path)
    assert state_of(tmp_path) == "open"  # begun, but no process is there
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
    with pytest.raises(ValueError, match="record.json is no record"):
        read(tmp_path)
    assert state_of(tmp_path) == "open"


def test_failures_that_a_process_could_not_record_itself(tmp_path):
    note_failure(tmp_path, "no such file", 2)
    assert state_of(tmp_path) == "failed" and read(tmp_path).failure == {"reason": "no such file", "status": 2}
    clear_failure(tmp_path)
    assert state_of(tmp_path) == "open"
    note_failure(tmp_path, "killed by signal 9", -9)
    assert state_of(tmp_path) == "open" and read(tmp_path).failure["status"] == -9
    finished = some_run()
    finished.end()
    finished.save(tmp_path)
    note_failure(tmp_path, "another run was refused", 2)
    assert state_of(tmp_path) == "finished"


def test_one_process_at_a_time(tmp_path):
    """The lock is its process's until that ends, however it ends."""
    code = f"from tupe import record; print(record.lock({str(tmp_path)!r}), flush=True); input()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **options) as other:
        assert other.stdout.readline() == "True\n"
        assert not record.lock(tmp_path) and record.is_locked(tmp_path)
        other.kill()
    assert not record.is_locked(tmp_path) and record.lock(tmp_path)
    assert record.lock(tmp_path)  # one's own
    record.unlock(tmp_path)
    assert not record.is_locked(tmp_path)
