"""Standard errors by their source, against formulas."""

import statistics

import numpy as np
import pytest
from helpers import write_run

from tupe.experiments.results import collect
from tupe.experiments.summary import summarise
from tupe.experiments.uncertainty import uncertainty_tables

EXAMPLES = 400


def tables_of(folder):
    collection = collect([folder])
    tables = uncertainty_tables(collection, summarise(collection.finished, "best"), "best")
    return [[dict(zip(table.header, cells, strict=True)) for _, cells in table.rows] for table in tables]


def write_predictions(folder, correct):
    """Predictions for RTE of which these are right."""
    (folder / "predictions").mkdir()
    rows = [f"{i}\t{'entailment' if right else 'not_entailment'}\tentailment" for i, right in enumerate(correct)]
    (folder / "predictions" / "valid_best.tsv").write_text("\n".join(["index\tprediction\ttarget", *rows]) + "\n")


def test_errors_by_their_source(tmp_path):
    """Two models that err on the same examples but ten: the error of the difference is that of ten examples."""
    for architecture, offset in (("bert_a_tiny", 0), ("tupe_a_tiny", 10)):
        for seed, first in enumerate((240, 250, 260), 1):
            folder = tmp_path / architecture / f"{seed}"
            score = 100 * (first + offset) / EXAMPLES
            write_run(folder, "RTE", 2e-5, seed, score, architecture=architecture)
            write_predictions(folder, np.arange(EXAMPLES) < first + offset)
    rows, differences = tables_of(tmp_path)
    bert = next(row for row in rows if row["model"].startswith("bert_a"))
    p = 250 / EXAMPLES
    by_formula = 100 * np.sqrt(p * (1 - p) / EXAMPLES)
    assert float(bert["development examples"]) == pytest.approx(by_formula, rel=0.15)
    scores = [100 * first / EXAMPLES for first in (240, 250, 260)]
    assert bert["fine-tuning seeds"] == f"{statistics.stdev(scores) / 3**0.5:.2f} (3)"
    assert bert["pre-training seeds"] == "? (1)" and bert["mean"] == "62.50"
    (difference,) = differences
    assert difference["mean"] == "+2.50" and difference["95 % over fine-tuning seeds"] == "+2.50 to +2.50 (3)"
    share = 30 / EXAMPLES  # ten for each of three seeds, and each of these seeds is a third of the mean
    expected = 100 * np.sqrt(share * (1 - share) / EXAMPLES) / 3
    assert float(difference["development examples"]) == pytest.approx(expected, rel=0.2)


def test_several_runs_of_pre_training_show_what_it_varies(tmp_path):
    for number, score in enumerate((60.0, 62.0), 1):
        path = f"/runs/{number}/checkpoint_last.pt"
        write_run(tmp_path / str(number), "RTE", 2e-5, 1, score, architecture="bert_a_tiny", pretrained=path)
    rows, _ = tables_of(tmp_path)
    assert [row["pre-training seeds"] for row in rows] == ["1.00 (2)"] * 2
    assert [row["fine-tuning seeds"] for row in rows] == ["? (1)"] * 2
    assert [row["development examples"] for row in rows] == ["?"] * 2  # no predictions were kept
