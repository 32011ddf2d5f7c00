"""Statistics of the experiments: intervals, tests and how they are shown, beside those of `tupe.sweep.scores`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tupe.sweep.scores import Seeds
from tupe.sweep.scores import mean_interval as interval_of_mean

ALPHA = 0.05  # of the corrected p-values
Blocks = dict[int, tuple]  # seed -> (summed loss of each held-out block, tokens of each)


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
    mean, interval = mean_interval(differences.values())
    if interval is None:
        p = None
    elif interval[0] == interval[1]:  # no variation, of which scipy warns; with a mean of 0 its p is nan
        p = float(mean == 0)
    else:
        p = float(stats.ttest_1samp([*differences.values()], 0).pvalue)
    return Contrast(mean, interval, p, differences)


def paired(values: dict[str, Seeds], a: str, b: str) -> Contrast | None:
    """The contrast of two models, None where they have no common seed."""
    return contrast(values[a], values[b]) if set(values.get(a, ())) & set(values.get(b, ())) else None


def mean_interval(values: Iterable[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, 95 % t-interval of the mean); no interval for fewer than `FEWEST` values."""
    return interval_of_mean(list(values))


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


def geometric_mean_interval(values: Iterable[float]) -> tuple[float, tuple[float, float] | None]:
    """`mean_interval` of the logarithms, taken back: for ratios."""
    mean, interval = mean_interval(map(math.log, values))
    return math.exp(mean), interval and (math.exp(interval[0]), math.exp(interval[1]))


def welch(a: Iterable[float], b: Iterable[float]) -> tuple[float, float, float, float]:
    """(mean of a - mean of b, the ends of its 95 % interval, two-sided p): not paired, variances may differ."""
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


def bootstrap(a: Blocks, b: Blocks, resamples: int = 2000, seed: int = 1) -> tuple[float, tuple[float, float]]:
    """(mean of a - b, 95 % percentile interval) of losses per token, where seeds and held-out blocks are both drawn
    anew (Sellam et al., 2022): what other seeds and another text might have given. Paired by seed and by block.

    With few seeds it is too narrow (its variance over n seeds is that of n, not n - 1): beside a t-interval over seeds
    it shows what the text adds. Raises ValueError without a common seed, or if runs differ in their blocks.
    """
    shared = sorted(set(a) & set(b))
    if not shared:
        raise ValueError(f"no common seed: {sorted(a)} and {sorted(b)}")
    runs = [blocks[s] for blocks in (a, b) for s in shared]
    counts = np.asarray(runs[0][1], dtype=float)
    if any(not np.array_equal(counts, tokens) for _, tokens in runs):
        raise ValueError("runs do not have the same held-out blocks")
    sums = np.array([losses for losses, _ in runs], dtype=float)
    differences = sums[: len(shared)] - sums[len(shared) :]  # [seeds, blocks]
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=resamples)  # times of each block
    losses = (drawn @ differences.T) / (drawn @ counts)[:, None]  # [resamples, seeds]
    seeds = rng.integers(len(shared), size=losses.shape)
    low, high = np.percentile(np.take_along_axis(losses, seeds, axis=1).mean(axis=1), [2.5, 97.5])
    return float(differences.sum(axis=1).mean() / counts.sum()), (float(low), float(high))


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
