"""A new encoding beside the committed runs: what is trained, and the numbers; runs are made up, nothing is trained."""

import copy
import re
import shutil

import pytest
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run
from helpers import write_data
from scipy import stats

from tupe.experiments import collect, compare, protocol, training
from tupe.experiments.plan import PLAN, Trial

LOSSES = {1: 5.3, 2: 5.32, 3: 5.31}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Of the pilot and the controls."""
    folder = tmp_path_factory.mktemp("experiment")
    write_experiment(folder / "runs", ["pilot", "controls"])
    collect.write(collect.collect(folder / "runs"), folder / "tables")
    return folder / "tables"


@pytest.fixture
def place(tables, tmp_path, monkeypatch):
    """These tables, and finished runs of `rope`; every planned run has to be one of these."""
    shutil.copytree(tables, tmp_path / "tables")
    name = protocol.name_of("rope", "bert_a")
    for lr in PLAN["learning_rates"]:
        write_run(tmp_path / "out", Trial("pilot", name, "tiny", 5000, lr, 101), 5.5 + (lr - 2e-3) ** 2 * 1e5)
    for seed, loss in LOSSES.items():
        write_run(tmp_path / "out", Trial("controls", name, "tiny", 5000, 2e-3, seed), loss, seconds=6)
    write_run(tmp_path / "out", Trial("cost", "bert_a", "tiny", 500, 2e-3, 1), 7.9, exit=400, seconds=5)
    write_data(tmp_path / "data")

    def no_training(jobs, *args, **options):
        assert {training.record.state_of(job.folder) for job in jobs} <= {"finished", "failed"}
        return dict.fromkeys(jobs, "finished")

    monkeypatch.setattr(training.runner, "run", no_training)
    monkeypatch.setattr(training, "TOKENS", 50)
    return tmp_path


def run(place, *words):
    given = ["--data", place / "data", "--output", place / "out", "--evidence", place / "tables", *words]
    return CliRunner().invoke(compare.command, list(map(str, given)))


def test_an_encoding_is_set_beside_the_committed_runs(place):
    plan = copy.deepcopy(PLAN)
    result = run(place, "--position=rope")
    assert result.exit_code == 0, result.output
    assert plan == PLAN  # which the whole process reads
    rows = {}
    for line in (place / "out" / "protocol.md").read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells
    committed = {
        Trial.parse(row["run"]).seed: float(row["loss"])
        for row in collect.read(place / "tables")["runs"]
        if row["run"].startswith("controls/bert_a/")
    }
    test = stats.ttest_rel([LOSSES[seed] for seed in (1, 2, 3)], [committed[seed] for seed in (1, 2, 3)])
    low, high = test.confidence_interval()
    mean = sum(LOSSES.values()) / 3 - sum(committed.values()) / 3
    assert rows["bert_a"][2] == f"{mean:.3f} [{low:.3f}, {high:.3f}]" and rows["bert_a"][4] == "better"
    assert rows["factored"][4] == "worse"
    assert rows["rope"][1].startswith("5.310 [") and rows["rope"][7:] == ["0.002", "0.40"]
    assert "over BERT-A's: 1.20" in result.output


def test_a_rate_at_the_edge_is_followed(place):
    for path in (place / "out" / "pilot").glob("own_rope_*/*lr0.004*/evaluation.json"):
        path.write_text(re.sub(r'"mean": [\d.]+', '"mean": 2', path.read_text()))
    assert isinstance(run(place, "--position=rope").exception, AssertionError)  # it would train the rate 0.008


def test_divergence_is_named(place):
    """With one seed, with all, and at every learning rate."""
    runs = sorted((place / "out").glob("controls/own_rope_*/*"))
    for count, folders in enumerate(([runs[0]], runs[1:])):
        for folder in folders:
            trial = Trial.parse("/".join(folder.parts[-3:]))
            shutil.rmtree(folder)
            write_run(place / "out", trial, 0, state="failed")
        result = run(place, "--position=rope")
        assert result.exit_code == 0 and f"diverged with seed {['1.', '1, 2, 3.'][count]}" in result.output
        assert "| **rope** |" in result.output
        row = next(line for line in result.output.splitlines() if line.startswith("| bert_a |"))
        difference, p, verdict = (cell.strip() for cell in row.split("|")[3:6])
        assert bool(re.fullmatch(r"-\d\.\d{3}", difference)) == (count == 0)  # of two seeds, without an interval
        assert (p, verdict) == ("–", "–")
    for folder in sorted((place / "out").glob("pilot/own_rope_*/*")):
        trial = Trial.parse("/".join(folder.parts[-3:]))
        shutil.rmtree(folder)
        write_run(place / "out", trial, 0, state="failed")
    result = run(place, "--position=rope")
    assert result.exit_code == 2 and "rope diverged at every learning rate" in result.output


@pytest.mark.parametrize("word", ["--max-update=20", "--seed", "--fp16", "optimization.lr=[1]", "model.dropout=0.1"])
def test_what_the_protocol_fixes_is_refused(word, place):
    result = run(place, "--position=rope", word)
    assert result.exit_code == 2 and f"{word.partition('=')[0]}: the protocol" in result.output


def test_tables_that_do_not_compare_are_refused(place):
    tables = collect.read(place / "tables")
    for row in tables["runs"]:
        row["data"] = "another"
    collect.write(tables, place / "tables")
    result = run(place, "--position=rope")
    assert result.exit_code == 2 and "losses do not compare" in result.output
    result = run(place, "--position=rope", "--evidence", place / "nowhere")
    assert result.exit_code == 2 and "no runs of the stage controls" in result.output
    assert run(place, "--position=rop").exit_code == 2


def test_another_precision_is_refused(place, monkeypatch):
    checked = []
    monkeypatch.setattr(training.runner, "check", checked.append)  # of the options, in a process of its own
    tables = collect.read(place / "tables")
    for row in tables["runs"]:
        row["precision"] = "bfloat16 autocast"
    collect.write(tables, place / "tables")
    for words in (["--autocast=none"], ["model.autocast=none"], ["--autocast", "fp16"]):
        result = run(place, "--position=rope", *words)
        assert result.exit_code == 2 and "valid: bf16, as the controls of" in result.output
    assert run(place, "--position=rope", "--autocast", "bf16").exit_code == 0 and checked


@pytest.mark.parametrize("precision, autocast", [("float32", "none"), ("bfloat16 autocast", "bf16")])
def test_the_precision_is_that_of_the_controls(precision, autocast, tmp_path):
    assert protocol.in_precision(("--lr", "1"), {precision}, tmp_path) == ("--lr", "1", "--autocast", autocast)
    assert protocol.in_precision((f"--autocast={autocast}",), {precision}, tmp_path) == (f"--autocast={autocast}",)
    assert protocol.in_precision((), set(), tmp_path) == ()
    with pytest.raises(ValueError, match="valid: one precision"):
        protocol.in_precision((), {"float32", "bfloat16 autocast"}, tmp_path)


def test_encodings_that_are_spelt_alike_have_folders_of_their_own():
    names = {protocol.name_of(position, "bert_a") for position in ("absolute+t5", "absolute:t5", "absolute+t5")}
    assert len(names) == 2 and all(re.fullmatch(r"[\w.]+", name) for name in names)
