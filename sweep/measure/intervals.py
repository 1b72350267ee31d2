"""95 % intervals: of a percentile by order statistics, of a mean by batch means, of a share by Wilson's score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Interval: TypeAlias = tuple[float, float]
Floats: TypeAlias = npt.NDArray[np.float64]

Z95 = NormalDist().inv_cdf(0.975)
_TAIL = 0.025
_EXACT_N = 10_000  # above, the normal approximation is off by less than one rank
FEWEST_BATCHES = 10
_MOST_BATCHES = 20
_FEWEST_IN_BATCH = 5
_MOST_ALIKE = 0.7  # correlation of neighbouring batches above which nothing is known of the mean's spread


def wilson(hits: int, n: int, z: float = Z95) -> Interval | None:
    """Return Wilson's score interval of a share (Wilson 1927); None without a trial. z: of the confidence wanted."""
    if n <= 0:
        return None
    share, weight = hits / n, z * z / n
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    # At the ends the interval touches 0 and 1 exactly; rounding may not push it beyond.
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    return low, 1.0 if hits == n else min(1.0, middle + half)


def percentile_interval(ordered: Floats, p: float, independent: int | None = None) -> Interval | None:
    """Return the interval of the p-quantile of sorted values; None where there are too few for one.

    Whatever the distribution, the number of values below its p-quantile is Binomial(n, p), so two order statistics
    enclose it (David and Nagaraja, Order Statistics, 7.1). independent: how many of the values are independent of each
    other, where that is fewer than all: tokens of one answer are not.
    """
    n = len(ordered)
    trials = n if independent is None else min(n, independent)
    ranks = _ranks(trials, p)
    if ranks is None:
        return None
    low = math.floor((ranks[0] - 1) * n / trials)
    high = math.ceil(ranks[1] * n / trials) - 1
    return float(ordered[low]), float(ordered[min(high, n - 1)])


def _ranks(n: int, p: float) -> tuple[int, int] | None:
    """Return the ranks, from 1, of the two values that enclose the p-quantile of n; None if one of them lies outside.

    They are the largest l with P(B < l) <= 2.5 % and the smallest u with P(B < u) >= 97.5 %, B being Binomial(n, p).
    """
    if n < 1:
        return None
    if n <= _EXACT_N:
        k = np.arange(n)
        steps = np.log((n - k) / (k + 1)) + math.log(p / (1 - p))
        log_pmf = n * math.log1p(-p) + np.concatenate([[0.0], np.cumsum(steps)])
        below = np.concatenate([[0.0], np.cumsum(np.exp(log_pmf))])  # below[l] = P(B < l)
        low = int(np.searchsorted(below, _TAIL, side="right")) - 1
        high = int(np.searchsorted(below, 1 - _TAIL))
    else:
        half = Z95 * math.sqrt(n * p * (1 - p))
        low, high = math.floor(n * p - half + 0.5), math.ceil(n * p + half + 0.5)
    return (low, high) if low >= 1 and high <= n else None


def mean_interval(values: Floats, independent: int | None = None) -> Interval | None:
    """Return the interval of the mean of values in the order of their time, by batch means; None for too few.

    Neighbours are alike, since they met the same queue; means of long enough batches are nearly independent.
    independent: as in percentile_interval.
    """
    trials = len(values) if independent is None else min(len(values), independent)
    batches = min(_MOST_BATCHES, trials // _FEWEST_IN_BATCH)
    if batches < FEWEST_BATCHES:
        return None
    found = batch_interval([float(batch.mean()) for batch in np.array_split(values, batches)])
    return found if found is None else _around(float(values.mean()), found)


def batch_interval(means: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of batches: Student's t over their means; None for fewer than 10.

    Where neighbouring batches are still alike (lag-1 correlation r > 0) its variance grows by (1 + r) / (1 - r), as for
    a first-order autoregressive series; where they are very much alike, as in a drift, there is no interval.
    """
    data = np.asarray(means, dtype=float)
    if len(data) < FEWEST_BATCHES:
        return None
    variance = float(data.var(ddof=1))
    alike = lag1(data)
    if alike > _MOST_ALIKE:
        return None
    widened = variance * (1 + alike) / (1 - alike) if alike > 0 else variance
    half = student(len(data) - 1) * math.sqrt(widened / len(data))
    middle = float(data.mean())
    return middle - half, middle + half


def lag1(data: Floats) -> float:
    """Return the correlation of neighbours; 0 for a constant series."""
    centred = data - data.mean()
    total = float(centred @ centred)
    # Rounding leaves a constant series with a spread of its last digits.
    if total <= len(data) * (1e-12 * float(np.abs(data).max(initial=0.0))) ** 2:
        return 0.0
    return float(centred[1:] @ centred[:-1]) / total


def student(freedom: int, z: float = Z95) -> float:
    """Return Student's t for `freedom` degrees, where the normal distribution has z.

    The expansion of Abramowitz and Stegun, 26.7.5; within 0.2 % from 5 degrees on.
    """
    v = float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _around(middle: float, interval: Interval) -> Interval:
    half = (interval[1] - interval[0]) / 2
    return middle - half, middle + half
