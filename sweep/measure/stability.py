"""Whether the queue of an open loop grows: then its latencies depend on how long was measured, not only on the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from sweep.measure.intervals import FEWEST_BATCHES, Floats, lag1, student
from sweep.measure.latency import ttft_sched_s
from sweep.model import LoadRun

_NS = 1e9
_GROWTH_FRAC = 0.10  # over the series, of its mean: less is no queue that runs away
_CERTAIN = NormalDist().inv_cdf(0.995)
_BACKLOG_SIGMAS = 3.0
_BIN_S = 0.5
_FEWEST_BINS = 2 * FEWEST_BATCHES


def growing(series: Sequence[float]) -> bool:
    """Tell whether a series grows for certain: means of stretches of equal length, such as of requests in flight.

    A line through ten batch means must rise, with 99.5 % confidence, by more than a tenth of the mean over the length
    of the series. Fewer than 20 values show nothing. Where what is left of the batches beside the line is alike in
    neighbours, as in any queue, confidence counts for less, as in intervals.batch_interval.
    """
    if len(series) < _FEWEST_BINS:
        return False
    length = len(series) // FEWEST_BATCHES
    recent = np.asarray(series[-length * FEWEST_BATCHES :], dtype=float)
    means = recent.reshape(FEWEST_BATCHES, length).mean(axis=1)
    level = float(means.mean())
    slope, error = _line(means)
    lowest = slope - student(FEWEST_BATCHES - 2, _CERTAIN) * error
    return level > 0 and lowest > 0 and slope * FEWEST_BATCHES > _GROWTH_FRAC * level


def _line(means: Floats) -> tuple[float, float]:
    """Return the slope of a line through the means, a step, and its standard error."""
    x = np.arange(len(means)) - (len(means) - 1) / 2
    spread = float(x @ x)
    slope = float(x @ means) / spread
    rest = means - means.mean() - slope * x
    alike = min(0.9, max(0.0, lag1(rest)))
    variance = float(rest @ rest) / (len(means) - 2) * (1 + alike) / (1 - alike)
    return slope, math.sqrt(variance / spread)


def backlog(due: int, ended: int) -> bool:
    """Tell whether more requests came than ended, beyond what chance makes of a stable queue: 3 sigma of Poisson."""
    return due - ended > _BACKLOG_SIGMAS * math.sqrt(due)


def stable(run: LoadRun) -> bool | None:
    """Tell whether an open loop's queue did not grow in the window; None in a closed loop, of a ramp, and if too short.

    It grew when requests in flight and TTFT from the schedule both did, or when far more came than ended. An open loop
    that has just begun fills until the first requests end, which is no queue: so much of the window is left out.
    """
    if run.verdict == "unstable":
        return False
    open_loop = [r for r in run.records if r.t_sched_ns is not None]
    if not open_loop or ".." in run.level:
        return None
    run = replace(run, window_start_ns=max(run.window_start_ns, _filled_ns(run)))
    if run.window_end_ns - run.window_start_ns < _FEWEST_BINS * _BIN_S * _NS:
        return None
    due = [r for r in open_loop if _inside(run, r.t_sched_ns)]
    if backlog(len(due), sum(_inside(run, r.t_end_ns) for r in open_loop)):
        return False
    in_time = sorted((r for r in due if r.status == "ok"), key=lambda r: r.t_sched_ns or 0)
    waits = [value for r in in_time if (value := ttft_sched_s(r)) is not None]
    # A trace has its own busy times, which are no queue that runs away.
    return run.level == "trace" or not (growing(in_flight(run)) and growing(waits))


def _filled_ns(run: LoadRun) -> int:
    """Return when nine of ten requests that came at the very beginning have ended."""
    lives = [r.t_end_ns - r.t_start_ns for r in run.records if r.status == "ok"]
    return run.start_ns + round(float(np.percentile(lives, 90))) if lives else run.start_ns


def in_flight(run: LoadRun) -> list[float]:
    """Return the mean number of requests due and not ended, for each half second of the window."""
    bins = math.floor((run.window_end_ns - run.window_start_ns) / _NS / _BIN_S)
    edges = np.arange(bins + 1) * _BIN_S
    total = np.zeros(bins)
    for record in run.records:
        begun = record.t_start_ns if record.t_sched_ns is None else record.t_sched_ns
        low, high = ((at - run.window_start_ns) / _NS for at in (begun, record.t_end_ns))
        first, last = max(0, math.floor(low / _BIN_S)), min(bins, math.floor(high / _BIN_S) + 1)
        if first < last:
            part = edges[first : last + 1].clip(low, high)
            total[first:last] += np.diff(part)
    return [float(value) for value in total / _BIN_S]


def _inside(run: LoadRun, at_ns: int | None) -> bool:
    return at_ns is not None and run.window_start_ns <= at_ns < run.window_end_ns
