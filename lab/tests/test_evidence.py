"""Runs as compressed tables, and what they show; on runs made up for the purpose."""

import math
import shutil

import pytest
from evidence_runs import read_back, write_experiment, write_plateau, write_run

from lab import collect
from lab.evidence import Evidence
from lab.plan import PLAN, Trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    write_experiment(folder / "out", ["main"])
    collect.write(collect.collect(folder / "out"), folder / "tables")
    return folder


def run(model, stage="main", seed=1, size="mini", updates=5000, lr=None):
    return Trial(stage, model, size, updates, lr or (5e-4 if stage == "main" else 1e-3), seed)


def test_a_run_counts_at_the_rate_that_the_pilot_decided(tmp_path):
    """The pilot was not over when the first run of a control began; its rate turned out to be another one."""
    write_experiment(tmp_path / "out", ["pilot", "controls"])
    early = run("tupe_a", "controls", 1, "tiny", lr=4e-3)
    write_run(tmp_path / "out", early, 1.0)
    evidence = read_back(tmp_path / "out")
    assert early in evidence.runs and early not in evidence.trials("controls")
    assert evidence.finals("controls")["tupe_a"][1] > 5


def test_a_run_that_diverges_is_the_worst_of_its_model(tmp_path):
    write_experiment(tmp_path / "out", ["pilot"])
    trial = run("nopos", "pilot", 101, "tiny", lr=2e-3)
    shutil.rmtree(trial.folder(tmp_path / "out"))
    write_run(tmp_path / "out", trial, 0, state="failed")
    evidence = read_back(tmp_path / "out")
    assert evidence.by_rate("pilot")["nopos"][2e-3] == math.inf
    assert evidence.best_rates["nopos"] == 1e-3 and evidence.threshold("main") == pytest.approx(7, abs=0.01)


def test_a_run_that_diverged_is_no_number(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "out", run("tupe_a", seed=seed), 6.0)
        write_run(tmp_path / "out", run("bert_a", seed=seed), 6.0, state="finished" if seed == 1 else "failed")
    finals = read_back(tmp_path / "out").finals("main")
    assert finals["tupe_a"].keys() == {1, 2} and finals["bert_a"].keys() == {1}


def test_no_plateau_where_nopos_diverged(tmp_path):
    for seed in PLAN["stages"]["first"]["seeds"]:
        state = "failed" if seed == PLAN["stages"]["first"]["seeds"][0] else "finished"
        write_run(tmp_path / "out", run("nopos", "first", seed, "tiny", 1250, 2e-3), 7.5, state=state)
    assert read_back(tmp_path / "out").threshold("first") is None


@pytest.mark.parametrize("content", [b"", None])
def test_a_damaged_table_is_named(content, folder, tmp_path):
    shutil.copytree(folder / "tables", tmp_path / "tables")
    path = tmp_path / "tables" / "training.csv.gz"
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(ValueError, match=r"training\.csv\.gz is (damaged|empty)"):
        collect.read(tmp_path / "tables")


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    whole = '| INFO | train_inner | {"num_updates": "50", "loss": "8.1", "train_wall": "7"}'
    (tmp_path / "train.log").write_text(f'{whole}\n| train_inner | {{"num_updates": "100", "lo$ tupe pretrain\n')
    assert collect.training_losses(tmp_path / "train.log") == {50: ("8.1", "7")}


def test_what_is_known_stays_where_a_copy_lacks_it(folder, tmp_path):
    """Scores whose weights are gone, and the loss of a run that is evaluated again."""
    known, trial, out = collect.read(folder / "tables"), run("tupe_a"), tmp_path / "out"
    scores = [{"run": str(trial), "updates": "500", "measure": measure} for measure in ("along", "order")]
    known |= {"pairs": [{"run": str(trial), "paradigm": "one"}], "paradigms": [{"paradigm": "one"}]}
    known["measures"] = [*known["measures"], *scores]
    write_run(out, trial, 5.0)
    merged = collect.merge(known, collect.collect(out))
    assert all(merged[name] == known[name] for name in ("pairs", "paradigms", "positional"))
    assert scores[0] in merged["measures"] and scores[1] not in merged["measures"]
    (trial.folder(out) / "evaluation.json").unlink()
    merged = collect.merge(known, collect.collect(out))
    assert [row for row in merged["runs"] if row["run"] == str(trial)][0]["loss"]


def test_a_run_that_failed_and_then_diverged_has_diverged(folder):
    known, name = collect.read(folder / "tables"), str(run("tupe_a"))

    def failed(reason):
        mine = [{**row, "state": "failed", "reason": reason, "loss": ""} for row in known["runs"] if row["run"] == name]
        return {**known, "runs": mine}

    for before, reason in ((failed("out of memory"), "diverged"), (known, "")):
        merged = collect.merge(before, failed("diverged"))
        assert [row["reason"] for row in merged["runs"] if row["run"] == name] == [reason]


def test_a_block_has_one_precision(tmp_path):
    tables = collect.read(tmp_path)
    for model, precision in (("bert_a", "float32"), ("tupe_a", "bfloat16 autocast")):
        name = str(run(model, "controls", size="tiny"))
        tables["runs"].append({"run": name, "state": "finished", "loss": "6", "precision": precision, "data": ""})
    with pytest.raises(ValueError, match="stage controls, seed 1: bfloat16 autocast and float32"):
        Evidence(tables)
    tables["runs"][-1]["run"] = str(run("tupe_a", "share", size="tiny", updates=1250))  # compared with the controls
    with pytest.raises(ValueError, match="stage share, seed 1: bfloat16 autocast and float32"):
        Evidence(tables)


def test_runs_on_other_data_are_refused(tmp_path):
    tables = collect.read(tmp_path)
    for model, data in (("bert_a", "one"), ("tupe_a", "two")):
        name = str(run(model, "controls", size="tiny"))
        tables["runs"].append({"run": name, "state": "finished", "loss": "6", "precision": "", "data": data})
    with pytest.raises(ValueError, match="different data .*one, two"):
        Evidence(tables)


def test_runs_of_several_machines_come_together(folder, tmp_path):
    write_run(tmp_path / "a", run("bert_a"), 6.0)
    write_run(tmp_path / "b", run("bert_a"), 5.9)
    write_run(tmp_path / "b", run("tupe_a"), 5.5)
    write_run(tmp_path / "c", run("bert_a"), 0.0, state="failed")
    write_run(tmp_path / "c", run("bert_r"), 0.0, state="failed")
    write_run(tmp_path / "c", run("tupe_r"), 0.0, state="running")
    for name in "abc":
        known = collect.read(tmp_path)
        collect.write(collect.merge(known, collect.collect(tmp_path / name)), tmp_path)
    evidence = Evidence(collect.read(tmp_path))
    assert evidence.finals("main") == {"bert_a": {1: pytest.approx(5.9)}, "tupe_a": {1: pytest.approx(5.5)}}
    assert evidence.failed == {run("bert_r"): "diverged"}
    assert len(evidence.curve(run("bert_a"))[0]) == 100
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")}
    known = collect.read(tmp_path)
    collect.write(collect.merge(known, collect.collect(tmp_path / "b")), tmp_path)  # nothing new
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")} == before


def test_exits_follow_from_straight_curves(tmp_path):
    """From 8 bits at `exit` a curve falls to `final` at the end, and is at y after (8 - y) / (8 - final) of the way."""
    out = tmp_path / "out"
    write_run(out, Trial("pilot", "nopos", "tiny", 5000, 2e-3, 101), 7.5)
    assert read_back(out).threshold("main") is None  # its other rates may be better
    shutil.rmtree(out)
    write_plateau(out, 7.5)
    write_run(out, run("bert_a"), 6.0, exit=3010)
    write_run(out, run("tupe_a"), 5.0, exit=1000)
    evidence = read_back(out)
    assert evidence.threshold("main") == pytest.approx(7.0, abs=1e-4)  # the best rate's 7.5, minus one half
    exits = evidence.by_seed("main", evidence.exit)
    assert exits["tupe_a"][1] == pytest.approx(1000 + 4000 / 3, abs=2)
    assert exits["bert_a"][1] == pytest.approx(3010 + 1990 / 2, abs=2)
