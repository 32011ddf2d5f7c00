"""The record of a run: what it says, and states of a folder."""

import sys
from pathlib import Path

import pytest

from tupe.run import record
from tupe.run.folder import lock, unlock
from tupe.run.record import Record, git_commit, note_failure, read, state_of


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


def test_states_of_a_folder(tmp_path):
    assert state_of(tmp_path / "none") == state_of(tmp_path) == "open"
    run = some_run()
    run.begin()
    run.save(tmp_path)
    assert state_of(tmp_path) == "open"  # begun, but no process is there: it was killed
    assert lock(tmp_path) and state_of(tmp_path) == "running"
    run.end()
    run.save(tmp_path)
    assert state_of(tmp_path) == "running"  # its checkpoint is written after its scores
    unlock(tmp_path)
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
    note_failure(tmp_path, "killed by signal 9", -9)
    assert state_of(tmp_path) == "open" and read(tmp_path).failure["status"] == -9
    finished = some_run()
    finished.end()
    finished.save(tmp_path)
    note_failure(tmp_path, "another run was refused", 2)
    assert state_of(tmp_path) == "finished"


def test_a_record_holds_no_nan(tmp_path):
    run = some_run(scores=scored(0.5))
    run.save(tmp_path)
    before = record.contents(tmp_path)
    run.scores[0]["matthews"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.save(tmp_path)
    assert record.contents(tmp_path) == before


def test_the_commit_is_that_of_this_tree(monkeypatch, tmp_path):
    """Not of a project in whose folder tupe is installed."""
    if not (Path(record.__file__).parents[2] / ".git").exists():
        pytest.skip("not a checkout")
    assert git_commit()
    monkeypatch.setattr(record, "__file__", str(tmp_path / "tupe" / "run" / "record.py"))
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
