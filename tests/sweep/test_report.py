"""Reports: tables, curves and pages of collected runs."""

import csv
import io
import re
import statistics

import pytest
from click.testing import CliRunner
from helpers import write_run, write_runs

from tupe.cli import main
from tupe.common import plotting
from tupe.data.glue import TASKS
from tupe.sweep import report
from tupe.sweep.report import (
    NO_BETTER,
    configuration_table,
    correlation_table,
    marked,
    metric_table,
    paper_tables,
    pretraining_curves,
    pretraining_table,
    run_table,
    write_report,
)
from tupe.sweep.runs import Model, collect
from tupe.sweep.summary import PAPER_COLUMNS, majority, summarise


def tables_of(folder):
    """(first of the paper's tables, table of all scores) of the runs in a folder."""
    collection = collect([folder])
    what = summarise(collection.finished, "best"), collection.all_failed(), majority(collection.finished)
    (_, _, table), *_ = paper_tables(*what)
    return table, metric_table(*what)


def rows_of(table, kind):
    return [dict(zip(table.header, cells, strict=True)) for k, cells in table.rows if k == kind]


def write_targets(folder, split, targets):
    (folder / "predictions").mkdir(exist_ok=True)
    rows = "".join(f"{i}\tx\t{target}\n" for i, target in enumerate(targets))
    (folder / "predictions" / f"{split}_last.tsv").write_text(f"index\tprediction\ttarget\n{rows}")


# ------------------------------------------------------------------------------------------------------------- tables


def test_paper_table(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80.25, 80.5, 81.0], 5e-5: [70.0]})
    table, scores = tables_of(tmp_path)
    (ours,), (minus,) = rows_of(table, "ours"), rows_of(table, "difference")
    spread, rate = rows_of(table, "detail")
    deviation = f"{statistics.stdev([80.25, 80.5, 81.0]):.2f}"
    assert ours["model"] == "tupe_r @ 1M" and minus["model"] == "minus TUPE-R (1M)"
    assert (ours["RTE"], ours["MNLI-mm"], spread["RTE"]) == ("80.50", "81.50", f"± {deviation} (3)")
    assert minus["RTE"] == f"{80.5 - 73.56:+.2f}" and minus["WNLI"] == ""
    assert (
        ours["average"] == f"{(8 * 80.5 + 81.5) / 9:.2f}"
        and minus["average"] == f"{(8 * 80.5 + 81.5) / 9 - 85.04:+.2f}"
    )
    assert {rate[column] for column in PAPER_COLUMNS} == {"2e-05"}
    theirs = {row["model"]: row for row in rows_of(table, "published")}
    assert theirs["TUPE-R (1M)"]["CoLA"] == "63.56" and theirs["TUPE-R (1M)"]["average"] == "85.04"
    mean = statistics.mean([80.25, 80.5, 81.0])
    assert rows_of(scores, "ours")[0]["RTE accuracy"] == f"{mean:.2f} ± {deviation}"


def test_models_of_another_size_and_with_some_tasks(tmp_path):
    write_runs(tmp_path, ["RTE", "CoLA"], {2e-5: [50.0]}, architecture="bert_a_tiny", updates=2450)
    table, _ = tables_of(tmp_path)
    (ours,), (minus,) = rows_of(table, "ours"), rows_of(table, "difference")
    assert ours["model"] == "bert_a_tiny @ 2450" and "BERT-A (1M, base size)" in minus["model"]
    assert ours["average"] == "" and ours["mean of CoLA RTE"] == "50.00"
    assert minus["mean of CoLA RTE"] == f"{50 - (55.19 + 68.61) / 2:+.2f}"


def test_what_is_no_better_than_one_answer_is_marked(tmp_path):
    for model, score in (("bert_a", 75.0), ("tupe_a", 75.5)):
        write_runs(tmp_path / model, ["RTE", "CoLA"], {2e-5: [score]}, architecture=model)
        write_runs(tmp_path / model, ["STS-B"], {2e-5: [score - 75]}, architecture=model)
    folder = tmp_path / "bert_a"
    write_targets(folder / "RTE" / "lr2e-05_seed1", "valid", ["entailment"] * 3 + ["not_entailment"])
    write_targets(folder / "STS-B" / "lr2e-05_seed1", "valid", ["0.5", "0.2"])
    table, scores = tables_of(tmp_path)
    (single,) = rows_of(table, "majority")
    assert (single["RTE"], single["STS-B"], single["CoLA"], single["average"]) == ("75.00", "0.00", "", "")
    bert, tupe = rows_of(table, "ours")
    assert bert["RTE"] == f"75.00{NO_BETTER}" and bert["STS-B"] == f"0.00{NO_BETTER}" and bert["CoLA"] == "75.00"
    assert tupe["RTE"] == "75.50" and tupe["STS-B"] == "0.50"
    bert, tupe = rows_of(scores, "ours")
    assert NO_BETTER in bert["RTE accuracy"] and NO_BETTER not in tupe["RTE accuracy"]
    assert f"**75.00{NO_BETTER}**" in write_report(collect([tmp_path]), tmp_path / "report").read_text()


@pytest.mark.parametrize(("value", "mark"), [(50.0, True), (49.0, True), (50.01, False)])
def test_marks(value, mark):
    assert marked(value, 50.0) == f"{value:.2f}{NO_BETTER * mark}"
    assert marked(value, None) == f"{value:.2f}"


def test_failed_runs_are_in_the_table_of_configurations(tmp_path):
    write_runs(tmp_path, ["RTE"], {2e-5: [60, 61, 62], 3e-5: [90]})
    for lr, seed in ((3e-5, 2), (3e-5, 3), (5e-5, 1)):
        write_run(tmp_path / f"{lr}_{seed}", "RTE", lr, seed, 1.0, state="failed")
    collection = collect([tmp_path])
    table = configuration_table(collection.models()[0], "RTE", collection)
    assert table.header[2:5] == ["seed 1", "seed 2", "seed 3"]
    best = [cells for kind, cells in table.rows if kind == "best"]
    assert [cells[0] for cells in best] == ["2e-05", "3e-05", "5e-05"]
    assert best[0][2:] == ["60.00", "61.00", "62.00", "61.00", "1.00"]
    assert best[1][2:] == ["90.00", "failed", "failed", "90.00", "?"]
    assert best[2][2:] == ["failed", "", "", "", ""]


def test_a_task_whose_runs_all_failed_is_in_the_tables(tmp_path):
    write_runs(tmp_path / "a", ["RTE", "CoLA"], {2e-5: [60]}, architecture="bert_a")
    write_runs(tmp_path / "b", ["RTE"], {2e-5: [60]}, architecture="tupe_a")
    write_run(tmp_path / "c", "CoLA", 2e-5, 1, 1.0, architecture="tupe_a", state="failed")
    table, scores = tables_of(tmp_path)
    assert [row["CoLA"] for row in rows_of(table, "ours")] == ["60.00", "failed"]
    assert [row["CoLA matthews"] for row in rows_of(scores, "ours")] == ["60.00 ± ?", "failed"]
    text = write_report(collect([tmp_path]), tmp_path / "report").read_text()
    assert text.count("\nCoLA matthews\n") == 2


def test_variants_of_an_architecture_are_models_of_their_own(tmp_path):
    write_run(tmp_path / "a", "RTE", 2e-5, 1, 60.0, architecture="bert_a_tiny")
    for position in ("sinusoidal", "shaw"):
        more = {"variant": f"position {position}", "pretrained": f"{position}.pt"}
        write_run(tmp_path / position, "RTE", 2e-5, 1, 61.0, architecture="bert_a_tiny", **more)
    table, scores = tables_of(tmp_path)
    assert [row["model"] for row in rows_of(table, "ours")] == ["bert_a_tiny @ 1M"]  # the paper has no variants
    names = {row["model"] for row in rows_of(scores, "ours")}
    assert names == {"bert_a_tiny @ 1M", *(f"bert_a_tiny (position {p}) @ 1M" for p in ("sinusoidal", "shaw"))}


def test_question_answering_is_in_the_table_of_all_scores(tmp_path):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0)
    run = write_run(tmp_path / "squad", "RTE", 2e-5, 1, 70.0, metrics=["f1", "exact"])
    run.task = "SQuAD-2.0"
    for entry in run.scores:
        entry.update(f1=61.25, exact=58.5)
    run.save(tmp_path / "squad")
    _, scores = tables_of(tmp_path)
    (row,) = rows_of(scores, "ours")
    assert (row["SQuAD-2.0 f1"], row["SQuAD-2.0 exact"]) == ("61.25 ± ?", "58.50 ± ?")


@pytest.mark.parametrize(("loss", "verdict"), [(2.0, "yes, 1.50"), (2.6, "FAILED, 0.90")])
def test_verdict_on_pretraining(loss, verdict):
    (_, cells), *_ = pretraining_table({Model("tupe_r", 7, "x"): (loss, 3.5)}).rows
    assert cells[1:] == [f"{loss:.3f}", "3.500", verdict]


def test_table_of_correlations_has_gaps(tmp_path):
    for name, value in (("bert_a", 70.0), ("bert_r", 72.0), ("tupe_a", 75.0)):
        write_run(tmp_path / name, "RTE", 2e-5, 1, value, architecture=name)
    summaries = summarise(collect([tmp_path]).finished, "best")
    probed = {model: {"up": i, "same": 1.0} for i, model in enumerate(sorted(summaries))}
    table = correlation_table(probed, summaries)
    assert table.header == ["property", "RTE accuracy"]
    assert [cells for _, cells in table.rows] == [["up", "+0.99"], ["same", ""]]
    for some, shown in ((probed, True), (dict(list(probed.items())[:2]), False)):
        text = write_report(collect([tmp_path]), tmp_path / "report", some).read_text()
        assert "Properties" in text and ("Pearson correlation" in text) == shown


def test_inputs_that_were_cut_are_counted(tmp_path):
    write_run(tmp_path / "a", "RTE", 2e-5, 1, 60.0, shortened={"train": 3, "valid": 1})
    write_run(tmp_path / "b", "CoLA", 2e-5, 1, 60.0)
    text = write_report(collect([tmp_path]), tmp_path / "report").read_text()
    assert "| tupe_r @ 1M | RTE | train | 3 |" in text and "| RTE | valid | 1 |" in text
    assert "Inputs that were cut" in text


# ----------------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def drawn(monkeypatch):
    """Lines {label: (xs, ys)} of every figure that is drawn."""
    figures_drawn, draw = [], plotting.png

    def watch(figure):
        lines = figure.axes[0].get_lines()
        figures_drawn.append({line.get_label(): tuple(map(list, line.get_data())) for line in lines})
        figure.canvas.draw()
        figures_drawn[-1]["ticks"] = [text.get_text() for text in figure.axes[0].get_xticklabels()]
        return draw(figure)

    monkeypatch.setattr(plotting, "png", watch)
    return figures_drawn


def test_learning_curves_are_medians_of_the_chosen_rate_over_whole_epochs(tmp_path, drawn):
    write_runs(tmp_path, ["RTE"], {2e-5: [60, 61, 90], 5e-5: [10, 20, 30]}, epochs=3)
    write_targets(tmp_path / "RTE" / "lr2e-05_seed1", "valid", ["entailment", "not_entailment"])
    collection = collect([tmp_path])
    summaries = summarise(collection.finished, "best")
    report.learning_curves(collection, summaries, "RTE", majority(collection.finished))
    (lines,) = drawn
    assert lines.pop("tupe_r @ 1M, lr 2e-05") == ([1, 2, 3], [61, 60, 60])
    assert lines.pop("majority")[1] == [50, 50]
    assert all(float(text) % 1 == 0 for text in lines.pop("ticks") if text)
    assert not lines


def test_several_checkpoints_of_a_run_give_the_pretraining_figure(tmp_path, drawn):
    for updates in (100_000, 300_000, 1_000_000):
        write_runs(tmp_path / str(updates), ["MNLI", "RTE"], {2e-5: [60 + updates / 1e5]}, updates=updates)
    collection = collect([tmp_path])
    pictures = pretraining_curves(summarise(collection.finished, "best"))
    assert len(pictures) == len(drawn) == 2
    assert drawn[0]["tupe_r"] == ([100_000, 300_000, 1_000_000], [61, 63, 70])
    assert drawn[1]["tupe_r"][1] == pytest.approx([61 + 1 / 3, 63 + 1 / 3, 70 + 1 / 3])  # of MNLI-m, -mm and RTE
    assert "Score against pre-training" in write_report(collection, tmp_path / "report").read_text()
    one = {key: run for key, run in collection.finished.items() if key[0].updates == 100_000}
    assert pretraining_curves(summarise(one, "best")) == []


# -------------------------------------------------------------------------------------------------------------- pages


def test_the_report_is_one_page_with_its_pictures(tmp_path):
    write_runs(tmp_path / "a", ["RTE", "CoLA"], {2e-5: [80.25, 80.5, 81.0], 5e-5: [70.0]})
    write_run(tmp_path / "b", "RTE", 9e-5, 1, 1.0, state="failed", failure={"reason": "out of memory", "status": 1})
    result = CliRunner().invoke(
        main, ["report", str(tmp_path / "a"), str(tmp_path / "b"), f"--output={tmp_path}/report"]
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report" / "report.md").read_text()
    assert "tupe_r @ 1M" in text and "8 finished runs, 1 failed, 0 missing" in text and "ICLR 2021, Table 1" in text
    assert all(label in text for label in ("best epoch of each run", "last epoch of each run", "Failed (1)"))
    assert "out of memory" in text and "None" not in text
    linked = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(linked) == 2
    assert all((tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG") for name in linked)
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


def test_rows_of_csv_have_the_settings_that_differ(tmp_path):
    for dropout in ("0", "0.2"):
        write_run(tmp_path / dropout, "RTE", 2e-5, 1, 60.0, config={"model.dropout": float(dropout)})
    rows = csv.DictReader(io.StringIO(run_table(collect([tmp_path])).csv()))
    settings = {(row["folder"], row["settings"]) for row in rows}
    assert settings == {(str(tmp_path / dropout), f"model.dropout {float(dropout)}") for dropout in ("0", "0.2")}


@pytest.mark.parametrize(
    ("output", "options", "named"), [("report", ["--properties"], "moved.pt"), ("file", [], "file")]
)
def test_files_that_cannot_be_read_or_written_are_named(tmp_path, output, options, named):
    if named.endswith(".pt"):
        pytest.importorskip("fairseq")
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0, pretrained=str(tmp_path / "moved.pt"))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["report", str(tmp_path / "run"), f"--output={tmp_path / output}", *options])
    assert result.exit_code == 2 and named in result.output
