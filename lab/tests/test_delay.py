"""Delays and offsets of curves whose delay and offset are known, and the words of the third protocol."""

import csv
import io

import numpy as np
import pytest

from lab import delay, estimates, third
from lab.estimates import contrast, first_below
from lab.known import FIRST, Runs
from lab.plan import Trial

THRESHOLD = 8.181


def curve(shift=0, offset=0.0, end=6400, noise=0):
    """A plateau, and from 500 + shift updates on a power law."""
    updates = np.arange(50, end + 1, 50)
    losses = np.where(updates < 500 + shift, 8.7, offset + 4 + 4.7 * np.clip((updates - shift) / 500, 1, None) ** -0.7)
    losses = losses + 0.02 * np.random.default_rng(noise).normal(size=len(losses)) * (noise > 0)
    return delay.Curve(updates, losses, first_below(updates.tolist(), losses.tolist(), THRESHOLD), True)


def run(model="tupe_a", seed=1, stage="lasting"):
    return Trial(stage, model, "mini", 8000, 1e-3, seed)


@pytest.mark.parametrize(
    ("shift", "offset", "noise"), [(1400, 0.25, 0), (1400, 0.25, 7), (700, 0.0, 5), (900, -0.2, 3)]
)
def test_a_fit_finds_delay_and_offset_without_the_exits(shift, offset, noise):
    bert, model = curve(shift, offset, noise=noise), curve(noise=2 * noise)
    found = delay.fit(bert, model)
    assert found.delay == pytest.approx(shift, abs=150 if noise else 0)
    assert found.offset == pytest.approx(offset, abs=0.04 if noise else 1e-9)
    assert found.residual < 0.02 and found.without > 0.98 * found.residual
    one = delay.lead(run(), model, bert)
    assert one.fit == found and one.delay == bert.exit - model.exit
    assert one.gaps[2000] == pytest.approx(offset + 0.01, abs=0.06) and abs(one.drift) < 0.03


def test_a_delay_may_be_longer_than_berts_exit():
    """BERT-A follows the model's curve later than its exit says."""
    found = delay.fit(curve(2200)._replace(exit=1900), curve())
    assert (found.delay, found.offset) == (2200, pytest.approx(0, abs=1e-9))


def test_an_offset_that_decays_drifts():
    bert, model = curve(1400), curve()
    shrinking = bert._replace(losses=bert.losses + 0.3 - 0.05 * bert.updates / 1000)
    assert delay.lead(run(), model, shrinking).drift == pytest.approx(-0.05, abs=0.005)


def test_a_model_that_stays_on_the_plateau_has_no_delay():
    bert, never = curve(1400), curve(9000)
    one = delay.lead(run(), never, bert)
    assert (one.exit, one.delay, one.fit, one.drift, one.gaps) == (None, None, None, None, {})
    assert delay.fit(curve(5000), curve()) is None  # too few points


def test_the_committed_page_and_table_are_those_of_the_committed_runs():
    page, table = delay.page()
    assert (FIRST / "delay.md").read_text(encoding="utf-8") == page
    assert (FIRST / "delay.csv").read_text(encoding="utf-8") == table
    rows = list(csv.DictReader(io.StringIO(table)))
    assert len({row["run"] for row in rows}) == len(rows) > 200
    mini = [row for row in rows if row["run"].startswith("lasting/tupe_")]
    assert len(mini) == 6 and all(1300 < float(row["delay"]) < 1500 and row["fit_offset"] for row in mini)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([-0.25, -0.24, -0.26], "an offset that is no delay"),
        ([-0.12, -0.05, -0.4], "not resolved"),
        ([-0.01, 0.02, 0.0], "the delay is all"),
        ([0.3, 0.31, 0.3], "not resolved"),
        ([-0.05, -0.051, -0.05], "the delay is all"),
    ],
)
def test_words_of_the_intervention(values, word):
    one = contrast(dict(enumerate(values, 1)), dict.fromkeys((1, 2, 3), 0.0))
    assert third.verdict_of_delayed(one) == word


@pytest.mark.parametrize(
    ("values", "p", "word"),
    [
        ([0.001, 0.007, 0.0, -0.003, 0.002], 0.4, "the offset stays, up to 4,400 updates after the exit"),
        ([-0.05, -0.06, -0.05, -0.04, -0.05], 0.001, "the offset shrinks"),
        ([0.05, 0.06, 0.05, 0.04, 0.05], 0.001, "the offset grows"),
        ([-0.05, -0.06, -0.05, -0.04, 0.001], 0.03, "not resolved"),  # a fresh seed has the other sign
        ([-0.005, -0.006, -0.005, -0.004, -0.005], 0.001, "the offset shrinks"),
        ([0.05, -0.06, 0.05, -0.04, 0.05], 0.9, "not resolved"),
    ],
)
def test_words_of_the_drift(values, p, word):
    one = contrast(dict(enumerate(values, 1)), dict.fromkeys((1, 2, 3, 4, 5), 0.0))
    assert third.verdict_of_drift(one, p, (4, 5)) == word


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([0.15, 0.12, 0.17], "an offset, which the rate had hidden"),
        ([0.01, -0.02, 0.0], "no offset at tiny size"),
        ([0.3, 0.02, 0.0], "not resolved"),
        ([-0.15, -0.12, -0.17], "reversed"),
    ],
)
def test_words_of_tiny_models_at_one_rate(values, word):
    one = contrast(dict(enumerate(values, 4)), dict.fromkeys((4, 5, 6), 0.0))
    assert third.verdict_of_rate(one) == word


def test_documents_are_drawn_whole():
    class Fake(Runs):
        def __init__(self, rows):
            self.rows = {"measures": rows}

        def planned(self, stage, updates=None):
            return [run(model, seed, "delay") for model in ("bert_a", "bert_a_trained") for seed in (1, 2, 3)]

    rows = [
        {"run": str(run(model, seed, "delay")), "measure": f"{name} by document", "part": str(part), "value": value}
        for model, worse in (("bert_a", 1.0), ("bert_a_trained", 0.0))
        for seed in (1, 2, 3)
        for part in range(40)
        for name, value in (("nats", 100 * (4 + worse * (part % 2))), ("tokens", 100))
    ]
    a, b = (third.by_document(Fake(rows), "delay", model) for model in ("bert_a", "bert_a_trained"))
    mean, (low, high) = estimates.bootstrap(a, b)
    assert mean == pytest.approx(0.5 / np.log(2)) and low < mean - 0.1 < mean + 0.1 < high  # 40 documents, not blocks
