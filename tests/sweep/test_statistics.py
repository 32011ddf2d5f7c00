"""Statistics against scipy and numbers computed by hand."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from tupe.sweep.statistics import contrast, first_below, holm, mean_interval, number


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
