"""GLUE's tasks: their labels, inputs and scores."""

import math

import numpy as np
import pytest

from tupe.data.examples import Examples
from tupe.data.glue import TASKS, glue_name, score
from tupe.data.splits import write_split


def test_label_order_is_the_official_one():
    # The order in which GLUE's own files and converters number the classes: alphabetical.
    for name, task in TASKS.items():
        assert list(task.labels) == sorted(task.labels), name
    assert {name for name, task in TASKS.items() if not task.labels} == {"STS-B"}
    assert TASKS["MNLI"].outputs == 3 and TASKS["STS-B"].outputs == 1


def test_task_names():
    assert [glue_name(x) for x in ("stsb", "STS-B", "sts_b", "cola", "sst2")] == ["STS-B"] * 3 + ["CoLA", "SST-2"]
    with pytest.raises(ValueError, match="unknown GLUE task 'squad'; valid: CoLA, SST-2"):
        glue_name("squad")


def test_long_pairs_lose_tokens_of_the_longer_sentence(tmp_path):
    def examples(limit, **lengths):
        folder = tmp_path / f"{limit}" / "SST-2" if len(lengths) == 1 else tmp_path / f"{limit}" / "RTE"
        for number, (first, counts) in enumerate(lengths.values()):
            (folder / f"input{number}").mkdir(parents=True)
            rows = [[*range(first, first + n), 2] for n in counts]
            write_split(folder / f"input{number}" / "test", rows, 100)
        (folder.parent / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(95)))
        return Examples(folder, "test", limit)

    pairs = examples(12, a=(10, [3, 10, 2, 10, 9]), b=(50, [3, 2, 10, 10, 0]))  # 4 special tokens, 8 others
    kept = [pairs[1, i][1] for i in range(5)]
    assert kept[0] == [0, 10, 11, 12, 2, 2, 50, 51, 52, 2]  # as sentence_prediction builds it
    assert [len(tokens) for tokens in kept] == pairs.sizes.tolist() == [10, 12, 12, 12, 12]
    assert kept[1] == [0, 10, 11, 12, 13, 14, 15, 2, 2, 50, 51, 2]
    assert kept[2] == [0, 10, 11, 2, 2, 50, 51, 52, 53, 54, 55, 2]
    assert kept[3] == [0, 10, 11, 12, 13, 2, 2, 50, 51, 52, 53, 2]
    assert kept[4] == [0, *range(10, 18), 2, 2, 2] and pairs.shortened == 4
    single = examples(6, a=(10, [3, 10]))
    assert single[1, 0] == (0, [0, 10, 11, 12, 2], None) and single[1, 1] == (1, [0, 10, 11, 12, 13, 2], None)


def test_scores_by_hand():
    targets, predictions = (
        [1, 1, 1, 0, 0, 1],
        [1, 0, 1, 0, 1, 1],
    )  # 3 true positives, 1 false, 1 true negative, 1 missed
    scores = score(["accuracy", "f1", "matthews"], predictions, targets)
    assert scores["accuracy"] == pytest.approx(100 * 4 / 6, abs=1e-12)
    assert scores["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 1), abs=1e-12)
    assert scores["matthews"] == pytest.approx(100 * (3 * 1 - 1 * 1) / math.sqrt(4 * 4 * 2 * 2), abs=1e-12)
    x, y = [1.0, 2.0, 3.0, 10.0], [0.1, 0.4, 0.3, 0.2]
    scores = score(["pearson", "spearman"], x, y)
    assert scores["pearson"] == pytest.approx(100 * np.corrcoef(x, y)[0, 1], abs=1e-9)
    assert scores["spearman"] == pytest.approx(100 * np.corrcoef([1, 2, 3, 4], [1, 4, 3, 2])[0, 1], abs=1e-9)
    assert all(type(value) is float for value in scores.values())


def test_constant_predictions_score_zero_and_infinite_ones_are_an_error():
    assert score(["pearson", "spearman"], [0.5, 0.5], [0.1, 0.9]) == {"pearson": 0.0, "spearman": 0.0}
    assert score(["matthews", "f1"], [0, 0], [0, 1]) == {"matthews": 0.0, "f1": 0.0}
    with pytest.raises(FloatingPointError, match="not finite"):
        score(["pearson"], [math.nan, 0.5], [0.1, 0.9])
