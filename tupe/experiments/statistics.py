"""Statistics of small experiments: paired contrasts with their uncertainty, corrected for their number, and shares of
updates. Every function takes plain numbers by seed."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
Seeds = dict[int, float]
Blocks = dict[int, tuple]  # seed -> (summed loss of each held-out block, tokens of each)
FEWEST = 3  # seeds; an interval from two says more about the t-distribution than about the models


@dataclass(frozen=True)
class Contrast:
    """Mean of a - b over the seeds that both have, with a 95 % t-interval and the two-sided p-value of the paired
    t-test. interval and p are None for fewer than `FEWEST` seeds."""

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
    values = list(differences.values())
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return Contrast(mean, None, None, differences)
    if not np.ptp(values):  # no variation: scipy has a p-value of nan for a mean of 0
        return Contrast(mean, (mean, mean), float(mean == 0), differences)
    test = stats.ttest_rel([a[seed] for seed in shared], [b[seed] for seed in shared])
    low, high = test.confidence_interval(CONFIDENCE)
    return Contrast(mean, (float(low), float(high)), float(test.pvalue), differences)


def mean_interval(values: list[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, 95 % t-interval of the mean); no interval for fewer than `FEWEST` values."""
    values = np.asarray(values, dtype=float)
    if len(values) < FEWEST:
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


# ------------------------------------------------------------------------------------- other tests of the same contrast


def welch(a: Seeds, b: Seeds) -> float | None:
    """p-value of Welch's t-test: not paired, variances may differ. None for fewer than `FEWEST` seeds."""
    if min(len(a), len(b)) < FEWEST:
        return None
    p = stats.ttest_ind([*a.values()], [*b.values()], equal_var=False).pvalue
    return 1.0 if math.isnan(p) else float(p)  # nan: two equal groups without variation


def pooled(a: Seeds, b: Seeds, groups: list[Seeds]) -> float | None:
    """p-value of the unpaired t-test whose variance is that within all `groups` (models), which are taken to vary
    alike. None for fewer than `FEWEST` seeds."""
    if min(len(a), len(b)) < FEWEST:
        return None
    freedom = sum(len(group) - 1 for group in groups)
    variance = sum((len(group) - 1) * np.var([*group.values()], ddof=1) for group in groups if len(group) > 1) / freedom
    difference = np.mean([*a.values()]) - np.mean([*b.values()])
    if not variance:
        return float(difference == 0)
    return float(2 * stats.t.sf(abs(difference) / math.sqrt(variance * (1 / len(a) + 1 / len(b))), freedom))


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
