"""The published tables of Wang et al.: consistent with themselves, and beside our models of the same encodings."""

import math
import shutil
import statistics

import numpy as np
import pytest
from helpers import write_run, write_runs
from scipy.stats import pearsonr, ttest_ind_from_stats

from lab import wang
from tupe.data.glue import TASKS
from tupe.run import record
from tupe.sweep.collection import Model, collect
from tupe.sweep.scores import summarise

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
    table = wang.score_table(summarise(collect([tmp_path]).finished))
    (_, theirs), (_, ours) = table.rows
    assert table.header[-1] == "mean" and (theirs[-1], ours[-1]) == ("82.2", "60.00")  # MNLI-mm, 61, is not in it


def test_a_mean_over_tasks_without_a_common_seed_stays_empty(tmp_path):
    for seed, task in enumerate(sorted(set(TASKS) - {"WNLI"}), 1):
        write_run(tmp_path / task, task, 2e-5, seed, 60, architecture="bert_a")
    (_, theirs), (_, ours) = wang.score_table(summarise(collect([tmp_path]).finished)).rows
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
    assert row("bert_a", "position shaw") == row("bert_a", "position shaw, segments learned") == "rpe"
    assert row("bert_a", "layer gau, position shaw") is row("tupe_a_tiny") is row("bert_a", "position rope") is None


def test_published_rows_stand_above_ours(tmp_path):
    for position, score in (("", 60.0), ("position shaw", 61.0), ("position rope", 62.0)):
        more = {"architecture": "bert_a_tiny", "variant": position, "pretrained": f"{position}.pt"}
        write_run(tmp_path / (position or "ape"), "CoLA", 2e-5, 1, score, **more)
    summaries = summarise(collect([tmp_path]).finished)
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


def test_mean_over_glue_takes_f1_and_spearman_and_leaves_wnli_out(tmp_path):
    for seed in (1, 2, 3):
        for task, score in {"CoLA": 10 * seed, "WNLI": 99, "MRPC": 80, "STS-B": 70}.items():
            folder = tmp_path / f"{task}{seed}"
            run = write_run(folder, task, 2e-5, seed, score)
            for entry in run.scores:
                entry.update({"f1": 60.0, "spearman": 50.0})
            run.save(folder)
    (lists,) = wang.score_lists(summarise(collect([tmp_path]).finished)).values()
    means = [(10 * seed + 60 + 50) / 3 for seed in (1, 2, 3)]
    name = next(iter(lists))
    assert name.startswith("mean of 3") and lists[name] == pytest.approx(means)
    (tmp_path / "CoLA2" / record.NAME).unlink()  # a seed that is not there in one of them does not count
    (lists,) = wang.score_lists(summarise(collect([tmp_path]).finished)).values()
    assert lists[name] == pytest.approx([means[0], means[2]])
    for folder in [*tmp_path.glob("MRPC*"), *tmp_path.glob("STS-B*")]:
        shutil.rmtree(folder)
    (lists,) = wang.score_lists(summarise(collect([tmp_path]).finished)).values()  # no mean of one column
    assert list(lists) == ["CoLA accuracy", "CoLA matthews", "WNLI accuracy"]


def test_mean_over_glue_has_one_column_of_mnli(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80]})
    write_run(tmp_path / "other", "MNLI", 2e-5, 1, 80.0, architecture="bert_a")
    summaries = {
        model: tasks
        for model, tasks in summarise(collect([tmp_path]).finished).items()
        if model.architecture == "tupe_r"
    }
    assert len(wang.mean_columns(summaries)) == 8 and ("MNLI", "valid", "accuracy") in wang.mean_columns(summaries)
    (lists,) = wang.score_lists(summaries).values()
    assert next(iter(lists.items())) == ("mean of 8 (F1, Spearman; no WNLI)", [80])  # MNLI-mm scores 81
    assert (
        wang.mean_columns(summarise(collect([tmp_path]).finished)) == []
    )  # two development sets of one task have no mean


def test_correlations_of_properties_with_scores(tmp_path):
    rng = np.random.default_rng(0)
    names = ("bert_a", "bert_r", "tupe_a", "tupe_r")
    scores = {name: rng.uniform(50, 90, size=3) for name in names}
    for name in names:
        write_runs(tmp_path / name, ["RTE"], {2e-5: scores[name]}, architecture=name)
    summaries = summarise(collect([tmp_path]).finished)
    values = {model: rng.uniform() for model in summaries}
    probed = {model: {"any": value, "same": 1.0, "unknown": math.nan} for model, value in values.items()}
    means = [statistics.mean(scores[model.architecture]) for model in summaries]
    expected = {"any": np.corrcoef(list(values.values()), means)[0, 1], "same": None, "unknown": None}
    row = {measure: cells["RTE accuracy"] for measure, cells in wang.correlations(probed, summaries).items()}
    assert row == pytest.approx(expected)
    # A model without position encoding takes no part, whatever it scores.
    nopos = Model("bert_a", 7, "/runs/nopos.pt", "position nopos")
    more = {**summaries, nopos: summaries[min(summaries)]}
    probed[nopos] = {"any": 9.0, "same": 9.0, "unknown": 9.0}
    assert wang.correlations(probed, more)["any"]["RTE accuracy"] == pytest.approx(expected["any"])
    two = dict(list(probed.items())[:2])
    assert wang.correlations(two, summaries)["any"]["RTE accuracy"] is None
