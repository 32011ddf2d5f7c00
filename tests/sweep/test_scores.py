"""Numbers from runs: the paper's choice of configurations, and averages."""

import statistics

import pytest
from helpers import write_runs

from tupe.data.glue import TASKS
from tupe.sweep.collection import Model, collect
from tupe.sweep.scores import (
    PAPER_COLUMNS,
    is_in,
    paper_row,
    published,
    summarise,
)


def summaries_of(folder):
    return summarise(collect([folder]).finished)


# ---------------------------------------------------------------------------------------------------------- published


def test_all_published_averages_are_the_mean_of_their_nine_columns():
    rows = [row for table in published()["tables"] for row in table["rows"]]
    assert len(rows) == 14 and published()["columns"] == PAPER_COLUMNS
    for row in rows:
        values = dict(zip(PAPER_COLUMNS, row["scores"], strict=True))
        assert round(statistics.mean(values.values()), 2) == row["average"], row["name"]
        # With MNLI counted once the printed numbers do not come out.
        once = [(values.pop("MNLI-m") + values.pop("MNLI-mm")) / 2, *values.values()]
        assert round(statistics.mean(once), 2) != row["average"]


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("tupe_r", ["base"]),
        ("tupe_r_tiny", ["base"]),  # a size that no paper has
        ("bert_a_large", ["large"]),
        ("electra_a_mini", ["electra"]),
        ("tupe_a_large", []),
    ],
)
def test_tables_of_an_architecture(architecture, names):
    tables = dict(zip(("base", "large", "electra"), published()["tables"], strict=True))
    assert [name for name, table in tables.items() if is_in(table, Model(architecture, 500, "x"))] == names
    assert not any(is_in(table, Model(architecture, 500, "x", "position shaw")) for table in tables.values())


# ----------------------------------------------------------------------------------------------------- configurations


def test_median_of_seeds_then_best_configuration(tmp_path):
    # The mean would choose 2e-5, the single best seed 5e-5; the median chooses 3e-5.
    write_runs(tmp_path, ["CoLA"], {2e-5: [50, 50, 90], 3e-5: [60, 61, 20], 5e-5: [10, 20, 95]})
    (model,) = summaries = summaries_of(tmp_path)
    assert summaries[model]["CoLA"].lr == 3e-5
    assert paper_row(summaries[model]) == {"CoLA": 60}


def test_what_is_left_of_a_configuration_wins_nothing(tmp_path):
    write_runs(tmp_path, ["RTE"], {2e-5: [60, 61, 62], 3e-5: [90]})
    (tasks,) = summaries_of(tmp_path).values()
    assert tasks["RTE"].lr == 2e-5


def test_both_mnli_sets_are_of_one_configuration(tmp_path):
    write_runs(tmp_path, ["MNLI"], {2e-5: [80], 3e-5: [79]})
    (tasks,) = summaries_of(tmp_path).values()
    assert paper_row(tasks) == {"MNLI-m": 80, "MNLI-mm": 81}


def test_wnli_is_beside_the_paper_s_columns(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80]})
    (tasks,) = summaries_of(tmp_path).values()
    assert set(paper_row(tasks)) == {*PAPER_COLUMNS, "WNLI"}
