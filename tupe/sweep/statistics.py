"""Statistics of small experiments, of plain numbers by seed: differences and means with their intervals by scipy's
t-tests, p-values corrected for their number, and how all of these are shown."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats

Seeds = dict[int, float]
ALPHA = 0.05  # of the corrected p-values
FEWEST = 3  # seeds; an interval from two says more about the t-distribution than about the models


@dataclass(frozen=True)
class Contrast:
    """Mean of a - b over the seeds that both have, with a 95 % t-interval and the two-sided p-value of the paired
    t-test. interval and p are None for fewer than `FEWEST` seeds."""

    mean: float
    interval: tuple[float, float] | None
    p: float | None
    differences: Seeds  # seed -> a - b


def contrast(a: Seeds, b: Seeds) -> Contrast:
    """Paired by seed. Raises ValueError if a and b have no seed in common."""
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    differences = {seed: a[seed] - b[seed] for seed in shared}
    return Contrast(*t_test([*differences.values()]), differences)


def paired(values: dict[str, Seeds], a: str, b: str) -> Contrast | None:
    """The contrast of two models, None where they have no common seed."""
    return contrast(values[a], values[b]) if set(values.get(a, ())) & set(values.get(b, ())) else None


def mean_interval(values: Iterable[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, 95 % t-interval of the mean); no interval for fewer than `FEWEST` values."""
    return t_test(list(values))[:2]


def t_test(values: list[float]) -> tuple[float, tuple[float, float] | None, float | None]:
    """(mean, its 95 % interval, two-sided p-value that it is 0); None for fewer than `FEWEST` values."""
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return mean, None, None
    if np.ptp(values) <= 1e-9 * abs(mean):  # no variation but rounding, of which scipy warns; with a mean of 0 p is nan
        return mean, (mean, mean), float(mean == 0)
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    return mean, (float(low), float(high)), float(test.pvalue)


def holm(p_values: list[float | None]) -> list[float | None]:
    """Adjusted p-values (Holm, 1979): those at most alpha are significant with a family-wise error of at most alpha.
    None, of a test with too few seeds, counts as 1 and stays None."""
    counted = [1.0 if p is None else p for p in p_values]
    adjusted, largest = [*p_values], 0.0
    for rank, index in enumerate(np.argsort(counted)):
        largest = max(largest, min(1.0, (len(counted) - rank) * counted[index]))
        if p_values[index] is not None:
            adjusted[index] = largest
    return adjusted


def first_below(updates: list[int], losses: list[float], threshold: float) -> float | None:
    """Updates at which a curve is first at or below a threshold, interpolated between the points around it; None if it
    never is."""
    for i, loss in enumerate(losses):
        if loss <= threshold:
            if i == 0:
                return float(updates[0])
            part = (losses[i - 1] - threshold) / (losses[i - 1] - loss)
            return updates[i - 1] + part * (updates[i] - updates[i - 1])
    return None


# ------------------------------------------------------------------------------------------------------------- as text


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{round(float(value), digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero


def shown(mean: float, interval: tuple[float, float] | None, digits: int) -> str:
    bounds = f" [{', '.join(number(bound, digits) for bound in interval)}]" if interval else ""
    return number(mean, digits) + bounds


def with_interval(values: Iterable[float], digits: int = 3) -> str:
    """ "6.123 [6.100, 6.146]": mean and 95 % t-interval; only the mean of fewer than three values."""
    return shown(*mean_interval(values), digits)


def of_contrast(one: Contrast | None, digits: int = 3) -> str:
    return "" if one is None else shown(one.mean, one.interval, digits)
