"""Tests of the second protocol beside those of `tupe.experiments.statistics`."""

from collections.abc import Iterable

import numpy as np
from scipy import stats


def welch_interval(a: Iterable[float], b: Iterable[float]) -> tuple[float, float, float, float]:
    """(mean of a - mean of b, the ends of its 95 % interval, two-sided p), with unequal variances."""
    a, b = np.array(list(a)), np.array(list(b))
    test = stats.ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return float(a.mean() - b.mean()), float(low), float(high), float(test.pvalue)


def equivalence(differences: Iterable[float], margin: float) -> float:
    """p of two one-sided t-tests (Schuirmann, 1987) that the mean of paired differences lies within +- margin: at most
    0.05 says that it does."""
    values = list(differences)
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    return float(max(below, above))
