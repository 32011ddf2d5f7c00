"""Statistics of the experiments against scipy and numbers computed by hand."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from lab.estimates import (
    bootstrap,
    contrast,
    equivalence,
    first_below,
    geometric_mean_interval,
    holm,
    mean_interval,
    number,
    welch,
)


def test_geometric_intervals():
    mean, (low, high) = geometric_mean_interval([0.25, 0.5, 1.0])
    assert mean == pytest.approx(0.5) and low * high == pytest.approx(0.25)


def test_welch_is_the_textbook_formula():
    a, b = [5.1, 5.3, 5.2, 5.6], [5.0, 5.05, 4.9]
    mean, low, high, p = welch(a, b)
    va, vb = (sum((x - sum(v) / len(v)) ** 2 for x in v) / (len(v) - 1) / len(v) for v in (a, b))
    df = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    half = stats.t.ppf(0.975, df) * math.sqrt(va + vb)
    assert (low, high) == pytest.approx((mean - half, mean + half))
    assert p == pytest.approx(2 * stats.t.sf(mean / math.sqrt(va + vb), df))


def test_equivalence_needs_the_90_percent_interval_inside_the_margin():
    inside, outside = [0.01, -0.02, 0.03, 0.0], [0.01, -0.02, 0.3, 0.0]
    for values in (inside, outside):
        mean, error = sum(values) / 4, stats.sem(values)
        half = stats.t.ppf(0.95, 3) * error
        assert (equivalence(values, 0.1) <= 0.05) == (abs(mean) + half <= 0.1)
    assert equivalence(inside, 0.1) <= 0.05 < equivalence(outside, 0.1)


@pytest.mark.parametrize(("of_seeds", "of_blocks"), [(0.1, 0.0), (0.0, 0.5), (0.1, 0.5)])
def test_seeds_and_blocks_are_drawn_anew_together(of_seeds, of_blocks):
    """Differences s + t, of seed and block: the variance of their mean is (n - 1) / n of the one over seeds, over n,
    plus the one over blocks, over their number. What both models share, blocks that are hard, does not count."""
    n, blocks, rng = 12, 400, np.random.default_rng(0)
    s, t, hard = of_seeds * rng.normal(size=n), of_blocks * rng.normal(size=blocks), rng.normal(6, 2, blocks)
    tokens = np.full(blocks, 20)
    a = {seed: (tokens * (hard + s[seed] + t), tokens) for seed in range(n)}
    b = dict.fromkeys(range(n), (tokens * hard, tokens))
    mean, (low, high) = bootstrap({**a, 99: b[0]}, b)  # a seed that one of them lacks is left out
    assert mean == pytest.approx(s.mean() + t.mean())
    error = math.sqrt(s.var() / n + t.var() / blocks)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert bootstrap(a, b) == bootstrap(a, b)  # the same draws


def test_losses_of_other_blocks_do_not_compare():
    a = {1: (np.ones(3), np.array([1, 2, 3]))}
    with pytest.raises(ValueError, match="same held-out blocks"):
        bootstrap(a, {1: (np.ones(3), np.array([1, 2, 4]))})
    with pytest.raises(ValueError, match="no common seed"):
        bootstrap(a, {2: a[1]})


def test_intervals():
    assert mean_interval([1.0, 2.0, 3.0]) == (
        2.0,
        pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))),
    )
    assert mean_interval([1.0, 2.0]) == (1.5, None)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.4: times 4, 3, 2, 1, and never less than the one before."""
    assert holm([0.03, 0.01, 0.4, 0.02]) == pytest.approx([0.06, 0.04, 0.4, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.01, None, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06)]


def test_curves():
    updates, losses = [100, 200, 300, 400], [9.0, 8.0, 8.5, 6.0]
    assert first_below(updates, losses, 8.5) == 150
    assert first_below(updates, losses, 7.25) == 350
    assert first_below(updates, losses, 9.5) == 100 and first_below(updates, losses, 5.0) is None


def test_a_number_of_numpy_is_rounded_as_any_other():
    """numpy multiplies before it rounds: of the accuracies of 2,000 sentences some would move."""
    for value in (-1.985, 0.9365, -1.95, 0.0625):
        assert number(np.float64(value), 2) == f"{value:.2f}"
    assert number(np.float64(-0.0004)) == "0.000" and number(None) == ""


def test_paired_contrast_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(5, 1, 6), rng.normal(4.5, 1, 6)
    result = contrast(dict(enumerate(a)), {**dict(enumerate(b)), 99: 0.0})  # a seed that one of them lacks is left out
    test = stats.ttest_rel(a, b)
    assert len(result.differences) == 6 and result.p == pytest.approx(test.pvalue)
    assert result.interval == pytest.approx(test.confidence_interval(0.95))
    assert result.mean == pytest.approx((a - b).mean())


def test_contrasts_without_an_interval():
    single = contrast({1: 2.0}, {1: 1.5})
    assert (single.mean, single.interval, single.p) == (0.5, None, None)
    two = contrast({1: 2.0, 2: 3.0}, {1: 1.5, 2: 2.7})
    assert (two.interval, two.p) == (None, None) and two.mean == pytest.approx(0.4)
    same = dict.fromkeys((1, 2, 3), 2.0)
    alike = contrast(same, dict.fromkeys((1, 2, 3), 1.0))
    assert (alike.interval, alike.p) == ((1.0, 1.0), 0.0) and contrast(same, same).p == 1.0  # no variation at all
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert contrast({1: 5.2, 2: 5.3, 3: 5.4}, {1: 5.1, 2: 5.2, 3: 5.3}).p == 0.0  # but rounding
    with pytest.raises(ValueError, match="no common seed"):
        contrast({1: 2.0}, {2: 2.0})
