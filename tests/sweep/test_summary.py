"""Numbers from runs: the paper's choice of configurations, averages, baselines, and what pre-trained models tell."""

import math
import shutil
import statistics

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import least_checkpoint, write_data, write_run, write_runs

from tupe.common import record
from tupe.data.glue import TASKS
from tupe.sweep.runs import Model, collect
from tupe.sweep.summary import (
    PAPER_COLUMNS,
    average,
    constant_scores,
    correlations,
    counterpart,
    majority,
    mean_columns,
    paper_row,
    pretraining,
    properties,
    published,
    score_lists,
    summarise,
    unigram_entropy,
)


def summaries_of(folder, epoch="best"):
    return summarise(collect([folder]).finished, epoch)


# ---------------------------------------------------------------------------------------------------------- published


def test_all_published_averages_are_the_mean_of_their_nine_columns():
    rows = [row for table in published()["tables"] for row in table["rows"]]
    assert len(rows) == 14 and published()["columns"] == PAPER_COLUMNS
    for row in rows:
        values = dict(zip(PAPER_COLUMNS, row["scores"], strict=True))
        assert round(average(values), 2) == row["average"], row["name"]
        # With MNLI counted once, or WNLI-like columns left in, the printed numbers do not come out.
        once = {**values, "MNLI-m": (values["MNLI-m"] + values["MNLI-mm"]) / 2}
        assert round(average(once, PAPER_COLUMNS[:1] + PAPER_COLUMNS[2:]), 2) != row["average"]


@pytest.mark.parametrize(
    ("table", "architecture", "updates", "name"),
    [
        ("base", "tupe_r", 1_000_000, "TUPE-R"),
        ("base", "tupe_r", 300_000, "TUPE-R mid"),
        ("base", "tupe_r_tiny", 500, "TUPE-R"),  # another size: beside the fully trained row
        ("base", "tupe_r_large", 1_000_000, None),
        ("base", "nopos", 1_000_000, None),
        ("large", "tupe_r", 1_000_000, None),
        ("large", "bert_a_large", 900_000, "BERT-Large"),
        ("electra", "electra_a_mini", 1, "ELECTRA"),
    ],
)
def test_counterparts(table, architecture, updates, name):
    tables = dict(zip(("base", "large", "electra"), published()["tables"], strict=True))
    row = counterpart(tables[table], Model(architecture, updates, "x"))
    assert (row and row["name"]) == name
    assert counterpart(tables[table], Model(architecture, updates, "x", "position shaw")) is None


# ----------------------------------------------------------------------------------------------------- configurations


def test_median_of_seeds_then_best_configuration(tmp_path):
    # The mean would choose 2e-5, the single best seed 5e-5; the median chooses 3e-5.
    write_runs(tmp_path, ["CoLA"], {2e-5: [50, 50, 90], 3e-5: [60, 61, 20], 5e-5: [10, 20, 95]})
    (model,) = summaries = summaries_of(tmp_path)
    assert summaries[model]["CoLA"].lr == 3e-5
    assert paper_row(summaries[model]) == {"CoLA": (60, [60, 61, 20])}
    assert paper_row(summaries_of(tmp_path, "last")[model]) == {"CoLA": (59, [59, 60, 19])}


def test_what_is_left_of_a_configuration_wins_nothing(tmp_path):
    write_runs(tmp_path, ["RTE"], {2e-5: [60, 61, 62], 3e-5: [90]})
    (tasks,) = summaries_of(tmp_path).values()
    assert tasks["RTE"].lr == 2e-5


def test_both_mnli_sets_are_of_one_configuration(tmp_path):
    write_runs(tmp_path, ["MNLI"], {2e-5: [80], 3e-5: [79]})
    (tasks,) = summaries_of(tmp_path).values()
    assert paper_row(tasks) == {"MNLI-m": (80, [80]), "MNLI-mm": (81, [81])}


# ----------------------------------------------------------------------------------------------------------- averages


def test_wnli_is_outside_of_the_average(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80]})
    row = paper_row(next(iter(summaries_of(tmp_path).values())))
    assert set(row) == {*PAPER_COLUMNS, "WNLI"}
    values = {column: value for column, (value, _) in row.items()}
    assert average({**values, "WNLI": 0.0}) == pytest.approx((8 * 80 + 81) / 9, abs=1e-12)
    del values["RTE"]
    assert average(values) is None


def test_mean_over_glue_takes_f1_and_spearman_and_leaves_wnli_out(tmp_path):
    for seed in (1, 2, 3):
        for task, score in {"CoLA": 10 * seed, "WNLI": 99, "MRPC": 80, "STS-B": 70}.items():
            folder = tmp_path / f"{task}{seed}"
            run = write_run(folder, task, 2e-5, seed, score)
            for entry in run.scores:
                entry.update({"f1": 60.0, "spearman": 50.0})
            run.save(folder)
    (lists,) = score_lists(summaries_of(tmp_path)).values()
    means = [(10 * seed + 60 + 50) / 3 for seed in (1, 2, 3)]
    name = next(iter(lists))
    assert name.startswith("mean of 3") and lists[name] == pytest.approx(means)
    (tmp_path / "CoLA2" / record.NAME).unlink()  # a seed that is not there in one of them does not count
    (lists,) = score_lists(summaries_of(tmp_path)).values()
    assert lists[name] == pytest.approx([means[0], means[2]])
    for folder in [*tmp_path.glob("MRPC*"), *tmp_path.glob("STS-B*")]:
        shutil.rmtree(folder)
    (lists,) = score_lists(summaries_of(tmp_path)).values()  # no mean of one column
    assert list(lists) == ["CoLA accuracy", "CoLA matthews", "WNLI accuracy"]


def test_mean_over_glue_has_one_column_of_mnli(tmp_path):
    write_runs(tmp_path, TASKS, {2e-5: [80]})
    write_run(tmp_path / "other", "MNLI", 2e-5, 1, 80.0, architecture="bert_a")
    summaries = {model: tasks for model, tasks in summaries_of(tmp_path).items() if model.architecture == "tupe_r"}
    assert len(mean_columns(summaries)) == 8 and ("MNLI", "valid", "accuracy") in mean_columns(summaries)
    (lists,) = score_lists(summaries).values()
    assert next(iter(lists.items())) == ("mean of 8 (F1, Spearman; no WNLI)", [80])  # MNLI-mm scores 81
    assert mean_columns(summaries_of(tmp_path)) == []  # two development sets of one task have no mean


# ----------------------------------------------------------------------------------------------------------- majority


@pytest.mark.parametrize(
    ("task", "targets", "expected"),
    [
        ("RTE", ["entailment"] * 3 + ["not_entailment"], {"accuracy": 75}),
        ("MRPC", ["1", "1", "1", "0"], {"accuracy": 75, "f1": 100 * 6 / 7}),
        ("QQP", ["1", "0", "0", "0"], {"accuracy": 75, "f1": 100 * 2 / 5}),  # another answer is best for F1
        ("CoLA", ["1", "1", "0"], {"accuracy": 100 * 2 / 3, "matthews": 0}),
        ("STS-B", ["0.2", "1.0"], {"pearson": 0, "spearman": 0}),
    ],
)
def test_scores_of_a_constant_answer(task, targets, expected):
    assert constant_scores(task, targets) == pytest.approx(expected)


def test_majority_is_read_from_the_targets_beside_predictions(tmp_path):
    write_runs(tmp_path, ["MNLI", "RTE"], {2e-5: [80, 81]})
    folder = tmp_path / "MNLI" / "lr2e-05_seed2" / "predictions"
    folder.mkdir()
    for split, targets in (("valid", ["neutral", "neutral", "entailment"]), ("valid1", ["neutral"])):
        rows = "".join(f"{i}\tcontradiction\t{target}\n" for i, target in enumerate(targets))
        (folder / f"{split}_last.tsv").write_text(f"index\tprediction\ttarget\n{rows}")
    baselines = majority(collect([tmp_path]).finished)
    assert baselines == pytest.approx({("MNLI", "valid", "accuracy"): 200 / 3, ("MNLI", "valid1", "accuracy"): 100})


# ---------------------------------------------------------------------------------------------- the pre-trained models


def test_pretraining_is_judged_by_the_unigram_entropy(tmp_path):
    data = write_data(tmp_path / "data")
    counts = np.bincount(np.fromfile(data / "train.bin", dtype=np.uint16))
    entropy = scipy.stats.entropy(counts)
    assert unigram_entropy(data) == pytest.approx(entropy)
    path = tmp_path / "checkpoint.pt"
    models = [Model("tupe_r", 1_000_000, str(path))]

    def write(**changes):
        checkpoint = {**least_checkpoint(1_000_000, data=data), "extra_state": {"val_loss": 3.0}}
        torch.save({**checkpoint, **changes}, path)
        return checkpoint

    checkpoint = write()
    assert list(pretraining(models).values()) == [pytest.approx((3.0 * math.log(2), entropy))]
    write(extra_state={})
    with pytest.raises(ValueError, match="no validation loss"):
        pretraining(models)
    write(cfg={**checkpoint["cfg"], "criterion": {"_name": "electra"}})  # its loss is another one
    assert pretraining(models) == {}
    write(optimizer_history=[{"num_updates": 7}])
    for of in (pretraining, properties):
        with pytest.raises(ValueError, match="no longer the one that was fine-tuned"):
            of(models)
    (tmp_path / "data" / "train.idx").unlink()
    with pytest.raises(ValueError, match="has no split 'train'"):
        unigram_entropy(data)


def test_correlations_of_properties_with_scores(tmp_path):
    rng = np.random.default_rng(0)
    names = ("bert_a", "bert_r", "tupe_a", "tupe_r")
    scores = {name: rng.uniform(50, 90, size=3) for name in names}
    for name in names:
        write_runs(tmp_path / name, ["RTE"], {2e-5: scores[name]}, architecture=name)
    summaries = summaries_of(tmp_path)
    values = {model: rng.uniform() for model in summaries}
    probed = {model: {"any": value, "same": 1.0, "unknown": math.nan} for model, value in values.items()}
    means = [statistics.mean(scores[model.architecture]) for model in summaries]
    expected = {"any": np.corrcoef(list(values.values()), means)[0, 1], "same": None, "unknown": None}
    row = {measure: cells["RTE accuracy"] for measure, cells in correlations(probed, summaries).items()}
    assert row == pytest.approx(expected)
    # A model without position encoding takes no part, whatever it scores.
    nopos = Model("bert_a", 7, "/runs/nopos.pt", "position nopos")
    more = {**summaries, nopos: summaries[min(summaries)]}
    probed[nopos] = {"any": 9.0, "same": 9.0, "unknown": 9.0}
    assert correlations(probed, more)["any"]["RTE accuracy"] == pytest.approx(expected["any"])
    two = dict(list(probed.items())[:2])
    assert correlations(two, summaries)["any"]["RTE accuracy"] is None
