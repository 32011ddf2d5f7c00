"""Statistics against scipy and numbers computed by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from tupe.experiments.statistics import (
    contrast,
    first_below,
    geometric_mean_interval,
    geometric_share,
    holm,
    mean_interval,
    share_of_schedule,
    share_of_updates,
)


def test_paired_contrast_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(5, 1, 6), rng.normal(4.5, 1, 6)
    result = contrast(dict(enumerate(a)), {**dict(enumerate(b)), 99: 0.0})  # a seed that one of them lacks is left out
    test = stats.ttest_rel(a, b)
    assert result.seeds == 6 and result.p == pytest.approx(test.pvalue)
    assert result.interval == pytest.approx(test.confidence_interval(0.95))
    assert result.mean == pytest.approx((a - b).mean())


def test_contrasts_without_an_interval():
    single = contrast({1: 2.0}, {1: 1.5})
    assert (single.mean, single.interval, single.p) == (0.5, None, None)
    assert contrast({1: 2.0, 2: 3.0}, {1: 1.0, 2: 2.0}).p == 0.0  # no variation at all
    with pytest.raises(ValueError, match="no common seed"):
        contrast({1: 2.0}, {2: 2.0})


def test_intervals():
    assert mean_interval([1.0, 2.0, 3.0]) == (
        2.0,
        pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))),
    )
    mean, (low, high) = geometric_mean_interval([0.25, 1.0])
    assert mean == pytest.approx(0.5) and low * high == pytest.approx(0.25)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.4: times 4, 3, 2, 1, and never less than the one before."""
    assert holm([0.03, 0.01, 0.4, 0.02]) == pytest.approx([0.06, 0.04, 0.4, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_curves():
    updates, losses = [100, 200, 300, 400], [9.0, 8.0, 8.5, 6.0]
    assert first_below(updates, losses, 8.5) == 150
    assert first_below(updates, losses, 7.25) == 350
    assert first_below(updates, losses, 9.5) == 100 and first_below(updates, losses, 5.0) is None
    assert share_of_updates(updates, losses, 7.25, 400) == 0.875
    assert share_of_updates(updates, losses, 5.0, 400) == math.inf


def test_shares_of_schedules():
    finals = {0.25: 8.0, 0.5: 6.0, 1.0: 5.0}
    assert share_of_schedule(finals, 7.0) == pytest.approx(math.sqrt(0.25 * 0.5))
    assert share_of_schedule(finals, 5.0) == pytest.approx(1.0)
    assert share_of_schedule(finals, 9.0) == 0.25 and share_of_schedule(finals, 4.9) == math.inf
    assert geometric_share([0.5, math.inf]) == (math.inf, None)
    assert geometric_share([0.5, 0.5])[0] == pytest.approx(0.5)
