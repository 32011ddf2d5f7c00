"""Reports: tables and pages of collected runs."""

import csv
import io
import re
import statistics

from click.testing import CliRunner
from helpers import write_run, write_runs

from tupe.cli import main
from tupe.data.glue import TASKS
from tupe.sweep.collection import collect
from tupe.sweep.report import paper_tables, run_table
from tupe.sweep.scores import Uncertainty, summarise


def tables_of(folder):
    """(first of the paper's tables, table of all scores) of the runs in a folder."""
    summaries = summarise(collect([folder]).finished)
    (_, _, table), *_ = paper_tables(summaries)
    return table, Uncertainty(summaries).score_table()


def rows_of(table, kind):
    return [dict(zip(table.header, cells, strict=True)) for k, cells in table.rows if k == kind]


def rows_called(table, start):
    return [row for row in rows_of(table, "") if row["model"].startswith(start)]


# ------------------------------------------------------------------------------------------------------------- tables


def test_paper_table(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80.25, 80.5, 81.0], 5e-5: [70.0]})
    table, scores = tables_of(tmp_path)
    (ours,) = rows_of(table, "ours")
    deviation = f"{statistics.stdev([80.25, 80.5, 81.0]):.2f}"
    assert (ours["model"], ours["RTE"], ours["MNLI-mm"]) == ("tupe_r @ 1M", "80.50", "81.50")
    assert ours["average"] == f"{(8 * 80.5 + 81.5) / 9:.2f}"
    theirs = {row["model"]: row for row in rows_of(table, "")}
    assert theirs["TUPE-R (1M)"]["CoLA"] == "63.56" and theirs["TUPE-R (1M)"]["average"] == "85.04"
    mean = statistics.mean([80.25, 80.5, 81.0])
    (row,) = [row for row in rows_of(scores, "") if row["score"] == "RTE accuracy"]
    assert (row["mean ± deviation"], row["learning rate"]) == (f"{mean:.2f} ± {deviation}", "2e-05")


def test_runs_that_were_scored_on_other_splits_are_other_rows(tmp_path):
    write_run(tmp_path / "both", "MNLI", 2e-5, 1, 80.0)
    run = write_run(tmp_path / "one", "MNLI", 2e-5, 2, 70.0)
    run.splits, run.scores = ["valid"], [entry for entry in run.scores if entry["split"] == "valid"]
    run.save(tmp_path / "one")
    table, _ = tables_of(tmp_path)
    found = {row["model"]: row["MNLI-m"] for row in rows_of(table, "ours")}
    assert found == {"tupe_r (scored on valid,valid1) @ 1M": "80.00", "tupe_r (scored on valid) @ 1M": "70.00"}


def test_models_of_another_size_and_with_some_tasks(tmp_path):
    write_runs(tmp_path, ["RTE", "CoLA"], {2e-5: [50.0]}, architecture="bert_a_tiny", updates=2450)
    table, _ = tables_of(tmp_path)
    (ours,), (theirs,) = rows_of(table, "ours"), rows_called(table, "BERT-A (1M)")
    assert (ours["model"], ours["average of 2"]) == ("bert_a_tiny @ 2450", "50.00")
    assert theirs["average of 2"] == f"{(55.19 + 68.61) / 2:.2f}"


def test_question_answering_is_in_the_table_of_all_scores(tmp_path):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0)
    run = write_run(tmp_path / "squad", "RTE", 2e-5, 1, 70.0, metrics=["f1", "exact"])
    run.task = "SQuAD-2.0"
    for entry in run.scores:
        entry.update(f1=61.25, exact=58.5)
    run.save(tmp_path / "squad")
    _, scores = tables_of(tmp_path)
    found = {row["score"]: row["mean ± deviation"] for row in rows_of(scores, "")}
    assert found == {"RTE accuracy": "70.00 ± ?", "SQuAD-2.0 f1": "61.25 ± ?", "SQuAD-2.0 exact": "58.50 ± ?"}


# -------------------------------------------------------------------------------------------------------------- pages


def test_the_report_is_one_page(tmp_path):
    write_runs(tmp_path / "a", ["RTE", "CoLA"], {2e-5: [80.25, 80.5, 81.0], 5e-5: [70.0]})
    write_run(tmp_path / "b", "RTE", 9e-5, 1, 1.0, state="failed", failure={"reason": "out of memory", "status": 1})
    result = CliRunner().invoke(
        main, ["report", str(tmp_path / "a"), str(tmp_path / "b"), f"--output={tmp_path}/report"]
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        "tupe_r @ 1M" in text
        and "8 finished runs, 1 failed, 0 unfinished, 0 left out" in text
        and "ICLR 2021, Table 1" in text
    )
    sections = re.findall("^## (.*)", text, flags=re.M)
    assert sections == ["GLUE dev, BERT-Base setting (110M)", "All scores", "Failed (1)"]
    assert "out of memory" in text and "None" not in text
    for line in re.findall(r"^\|.*$", text, flags=re.M):
        assert "|  |" not in line, "an empty cell is a dash"


def test_runs_as_csv(tmp_path):
    write_runs(tmp_path, ["MNLI", "STS-B"], {2e-5: [1 / 3]})
    rows = list(csv.DictReader(io.StringIO(run_table(collect([tmp_path])).csv())))
    assert len(rows) == 2 * 2 * 2  # epochs, tasks, and two splits or two metrics
    assert {row["settings"] for row in rows} == {""}  # nothing to tell apart
    assert {(row["task"], row["metric"]) for row in rows if float(row["score"]) == 1 / 3} == {
        ("MNLI", "accuracy"), ("STS-B", "pearson"), ("STS-B", "spearman"),
    }  # fmt: skip


def test_a_report_that_cannot_be_written_is_refused_by_name(tmp_path):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["report", str(tmp_path / "run"), f"--output={tmp_path / 'file'}"])
    assert result.exit_code == 2 and "file" in result.output
