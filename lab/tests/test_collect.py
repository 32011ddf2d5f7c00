"""Runs as compressed tables, on runs made up for the purpose."""

import pytest
from evidence_runs import write_run

from lab import collect
from lab.plan import Trial


def run(model, seed=1):
    return Trial("main", model, "mini", 5000, 5e-4, seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    for model in ("bert_a", "tupe_a"):
        write_run(folder / "out", run(model), 6.0)
    collect.write(collect.collect(folder / "out"), folder / "tables")
    return folder


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    whole = '| INFO | train_inner | {"num_updates": "50", "loss": "8.1", "train_wall": "7"}'
    (tmp_path / "train.log").write_text(f'{whole}\n| train_inner | {{"num_updates": "100", "lo$ tupe pretrain\n')
    assert collect.training_losses(tmp_path / "train.log") == {50: ("8.1", "7")}


def test_a_run_that_failed_and_then_diverged_has_diverged(folder):
    known, name = collect.read(folder / "tables"), str(run("tupe_a"))

    def failed(reason):
        mine = [{**row, "state": "failed", "reason": reason, "loss": ""} for row in known["runs"] if row["run"] == name]
        return {**known, "runs": mine}

    for before, reason in ((failed("out of memory"), "diverged"), (known, "")):
        merged = collect.merge(before, failed("diverged"))
        assert [row["reason"] for row in merged["runs"] if row["run"] == name] == [reason]


def test_the_loss_of_a_run_that_is_evaluated_again_stays(folder, tmp_path):
    known, trial, out = collect.read(folder / "tables"), run("tupe_a"), tmp_path / "out"
    write_run(out, trial, 5.0)
    (trial.folder(out) / "evaluation.json").unlink()
    merged = collect.merge(known, collect.collect(out))
    assert [row for row in merged["runs"] if row["run"] == str(trial)][0]["loss"]


def test_runs_of_several_machines_come_together(tmp_path):
    write_run(tmp_path / "a", run("bert_a"), 6.0)
    write_run(tmp_path / "b", run("bert_a"), 5.9)
    write_run(tmp_path / "b", run("tupe_a"), 5.5)
    write_run(tmp_path / "c", run("bert_a"), 0.0, state="failed")
    write_run(tmp_path / "c", run("bert_r"), 0.0, state="failed")
    write_run(tmp_path / "c", run("tupe_r"), 0.0, state="running")
    for name in "abc":
        known = collect.read(tmp_path)
        collect.write(collect.merge(known, collect.collect(tmp_path / name)), tmp_path)
    tables = collect.read(tmp_path)
    found = {row["run"]: row["loss"] or row["reason"] for row in tables["runs"]}
    assert found == {str(run("bert_a")): "5.90000", str(run("tupe_a")): "5.50000", str(run("bert_r")): "diverged"}
    assert len([row for row in tables["training"] if row["run"] == str(run("bert_a"))]) == 100
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")}
    collect.write(collect.merge(tables, collect.collect(tmp_path / "b")), tmp_path)  # nothing new
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")} == before
