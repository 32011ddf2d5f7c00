"""Statistics of small experiments: paired contrasts with their uncertainty, corrected for their number, and shares of
updates. Every function takes plain numbers by seed."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Contrast:
    """Mean of a - b over the seeds that both have, with a 95 % t-interval and the two-sided p-value of the paired
    t-test. interval and p are None for fewer than two seeds."""

    mean: float
    interval: tuple[float, float] | None
    p: float | None
    differences: dict  # seed -> a - b

    @property
    def seeds(self) -> int:
        return len(self.differences)


def contrast(a: dict[int, float], b: dict[int, float]) -> Contrast:
    """Paired by seed. Raises ValueError if a and b have no seed in common."""
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    differences = {seed: a[seed] - b[seed] for seed in shared}
    mean, interval = mean_interval(list(differences.values()))
    if interval is None:
        return Contrast(mean, None, None, differences)
    values = np.array(list(differences.values()))
    error = values.std(ddof=1) / math.sqrt(len(values))
    p = 2 * stats.t.sf(abs(mean) / error, len(values) - 1) if error else float(mean == 0)
    return Contrast(mean, interval, float(p), differences)


def mean_interval(values: list[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, 95 % t-interval of the mean); no interval for a single value."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return float(values.mean()), None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), (float(values.mean() - half), float(values.mean() + half))


def geometric_mean_interval(values: list[float]) -> tuple[float, tuple[float, float] | None]:
    """`mean_interval` of the logarithms, taken back: for ratios."""
    mean, interval = mean_interval(np.log(values))
    return math.exp(mean), None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def holm(p_values: list[float]) -> list[float]:
    """Adjusted p-values (Holm, 1979): those at most alpha are significant with a family-wise error of at most alpha."""
    order = np.argsort(p_values)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


# ---------------------------------------------------------------------------------------------- curves: loss by updates


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


def share_of_updates(updates: list[int], losses: list[float], target: float, total: int) -> float:
    """Share of `total` updates after which a curve reaches `target`: math.inf if it never does ("> 100 %")."""
    reached = first_below(updates, losses, target)
    return math.inf if reached is None else reached / total


def share_of_schedule(finals: dict[float, float], target: float) -> float:
    """Share of the updates with which a run, trained with full decay, would end at `target`.

    finals: {share of the updates: final loss of a run of that length}. Linear in log(share) between runs; a target
    above the shortest run's loss gives the shortest share (an upper bound), one below all gives math.inf.
    """
    shares = sorted(finals)
    reached = first_below([math.log(share) for share in shares], [finals[share] for share in shares], target)
    return math.inf if reached is None else math.exp(reached)


def geometric_share(shares: list[float]) -> tuple[float, tuple[float, float] | None]:
    """Geometric mean over seeds with its interval; math.inf, without an interval, if any seed never got there."""
    return (math.inf, None) if any(math.isinf(share) for share in shares) else geometric_mean_interval(shares)
