"""The published tables of Wang et al.: consistent with themselves, and beside our models of the same encodings."""

import statistics

import pytest
from helpers import write_run, write_runs
from scipy.stats import pearsonr, ttest_ind_from_stats

from lab import wang
from tupe.data.glue import TASKS
from tupe.sweep.runs import Model, collect
from tupe.sweep.summary import summarise

BORDERLINE = {("ape_sin_learned", "v2.0 F1"), ("ape_sin_learned", "v2.0 EM"), ("ape_rpe_sin_learned", "v1.1 EM")}


@pytest.mark.parametrize("measure", wang.published()["correlations"])
def test_their_correlations_follow_from_their_tables(measure):
    content = wang.published()
    rows = [row for row in content["properties"] if row != "nopos"]
    assert len(rows) == 12
    for column, value in content["correlations"][measure].items():
        of_squad = column.startswith("v")
        scores = [content["squad"][row][column]["mean"] if of_squad else content["glue"][row][column] for row in rows]
        computed = pearsonr([content["properties"][row][measure] for row in rows], scores)[0]
        assert round(abs(round(computed, 2) - value), 2) <= (0.11 if of_squad else 0.02), column


def test_their_mean_over_glue_is_that_of_eight_columns():
    """MNLI counts once, WNLI does not."""
    columns = ["CoLA", "SST-2", "MNLI", "MRPC F1", "QNLI", "QQP F1", "RTE", "STS-B Spearman"]
    for name, row in wang.published()["glue"].items():
        assert statistics.mean(row[column] for column in columns) == pytest.approx(row["mean"], abs=0.0501), name


def test_our_mean_stands_beside_theirs_and_is_of_the_same_columns(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [60]}, architecture="bert_a")
    table = wang.score_table(summarise(collect([tmp_path]).finished, "best"))
    (_, theirs), (_, ours) = table.rows
    assert table.header[-1] == "mean" and (theirs[-1], ours[-1]) == ("82.2", "60.00")  # MNLI-mm, 61, is not in it


def test_a_mean_over_tasks_without_a_common_seed_stays_empty(tmp_path):
    for seed, task in enumerate(sorted(set(TASKS) - {"WNLI"}), 1):
        write_run(tmp_path / task, task, 2e-5, seed, 60, architecture="bert_a")
    (_, theirs), (_, ours) = wang.score_table(summarise(collect([tmp_path]).finished, "best")).rows
    assert (theirs[-1], ours[-1]) == ("82.2", "")


def test_their_marks_are_a_welch_test_but_for_three_borderline_cells():
    differ, squad = set(), wang.published()["squad"]
    for row, columns in squad.items():
        for column, entry in columns.items():
            ape = squad["ape"][column]
            test = ttest_ind_from_stats(entry["mean"], entry["std"], 5, ape["mean"], ape["std"], 5, equal_var=False)
            better = entry["mean"] > ape["mean"] and test.pvalue < 0.05
            if better != entry["significant"]:
                differ.add((row, column))
                assert 0.04 < test.pvalue < 0.07
    assert differ == BORDERLINE


def test_rows_are_found_by_their_encoding():
    assert len(wang.rows()) == len(wang.published()["glue"]) == 13

    def row(architecture, variant=""):
        return wang.counterpart(Model(architecture, 10, "x.pt", variant))

    assert row("bert_a_tiny") == "ape" and row("bert_a", "position nopos") == "nopos"
    assert row("bert_a_mini", "position absolute+shaw_sinusoidal_learned:amplitude:10") == "ape_rpe_sin_learned"
    assert row("bert_a", "position shaw") == "rpe"
    assert row("bert_a", "layer gau, position shaw") is row("tupe_a_tiny") is row("bert_a", "position rope") is None


def test_published_rows_stand_above_ours(tmp_path):
    for position, score in (("", 60.0), ("position shaw", 61.0), ("position rope", 62.0)):
        more = {"architecture": "bert_a_tiny", "variant": position, "pretrained": f"{position}.pt"}
        write_run(tmp_path / (position or "ape"), "CoLA", 2e-5, 1, score, **more)
    summaries = summarise(collect([tmp_path]).finished, "best")
    table = wang.score_table(summaries)
    assert table.header == ["model", "CoLA"]
    assert [cells for _, cells in table.rows] == [
        ["ape (published)", "60.2"], ["bert_a_tiny @ 1M", "60.00"],
        ["rpe (published)", "58.9"], ["bert_a_tiny (position shaw) @ 1M", "61.00"],
    ]  # fmt: skip
    probed = {model: dict.fromkeys(wang.MEASURES, 0.5) for model in summaries}
    assert wang.property_table(probed).rows[0][1][1:3] == ["0.2461", "0.0208"]
    assert wang.published_score("rpe", "v1.1 F1") == "90.50 ± 0.08 ‡"


def test_the_thirteen_have_sinusoids_at_the_amplitude_that_trains_best():
    """Whether fixed or learned; fixed absolute ones stand alone."""
    fixed = "sinusoidal:amplitude:0.1"
    absolute = ("absolute", fixed, "sinusoidal_learned:amplitude:0.1")
    relative = ("shaw", "shaw_sinusoidal:amplitude:10", "shaw_sinusoidal_learned:amplitude:10")
    wanted = {"nopos", *absolute, *relative, *(f"{a}+{r}" for a in absolute if a != fixed for r in relative)}
    assert {*wang.ENCODINGS.values()} == wanted and len(wang.ENCODINGS) == 13
