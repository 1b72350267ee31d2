"""What a second of the window brought: tokens by the time of their arrival, completions, good requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sweep.measure.goodput import Cohort
from sweep.measure.intervals import FEWEST_BATCHES, Floats, Interval, batch_interval, wilson
from sweep.model import LoadRun, RequestRecord

_NS = 1e9
_LONG_BATCH_S = 5.0
_SHORTEST_BATCH_S = 1.0
_FEWEST_IN_BATCH = 2.0  # on average; batches of hardly any event are mostly empty
_MOST_BATCHES = 30


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the window, with the 95 % intervals of those that have one. None: no request succeeded."""

    output_tps: float | None = None
    total_tps: float | None = None
    request_rps: float | None = None
    goodput_rps: float | None = None
    slo_attainment_frac: float | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)


def window_rates(run: LoadRun, cohort: Cohort | None) -> Rates:
    """Measure the window. cohort: the counted requests as limits sorted them; None where no limit is set.

    Tokens count by the time at which they arrived, whatever became of their request; a prompt counts when its first
    token came. So nothing that the warm-up sent is lost or credited twice, and no ramp and no drain is in it. Goodput
    is of the requests that were due in the window, whenever they ended.
    """
    window_s = (run.window_end_ns - run.window_start_ns) / _NS
    if window_s <= 0:
        return Rates()
    batches = _batches(window_s)
    succeeded = any(r.counted and r.status == "ok" for r in run.records)
    output_at, output = events(run.records)
    prompt_at = [r.chunks[0][0] for r in run.records if r.chunks]
    prompt = [r.prompt_tokens for r in run.records if r.chunks]
    completed_at = [r.t_end_ns for r in run.records if r.status == "ok"]
    series = {
        "output_tps": _binned(run, output_at, output, batches),
        "total_tps": _binned(run, [*output_at, *prompt_at], [*output, *prompt], batches),
        "request_rps": _binned(run, completed_at, [1] * len(completed_at), batches),
    }
    found = {name: float(counts.sum()) / window_s if succeeded else None for name, counts in series.items()}
    attainment = None
    if cohort is not None and cohort.judged:
        due = [r.t_start_ns if r.t_sched_ns is None else r.t_sched_ns for r in cohort.good]
        series["goodput_rps"] = _binned(run, due, [1] * len(due), batches)
        found["goodput_rps"] = len(cohort.good) / window_s
        attainment = len(cohort.good) / cohort.judged
    intervals = {name: _interval(counts, window_s) for name, counts in series.items() if found[name] is not None}
    if attainment is not None and cohort is not None:
        intervals["slo_attainment_frac"] = wilson(len(cohort.good), cohort.judged)
    known = {name: interval for name, interval in intervals.items() if interval is not None}
    return Rates(**found, slo_attainment_frac=attainment, intervals=known)


def events(records: Iterable[RequestRecord]) -> tuple[list[int], list[int]]:
    """Return when events with tokens arrived, in ns, and how many tokens each of them carried."""
    chunks = [chunk for record in records for chunk in record.chunks]
    return [at for at, _ in chunks], [count for _, count in chunks]


def _batches(window_s: float) -> int:
    """Return into how many batches a window is cut: of 5 s each where that makes ten, else ten; none below a second."""
    if window_s < FEWEST_BATCHES * _SHORTEST_BATCH_S:
        return 1
    return min(_MOST_BATCHES, max(FEWEST_BATCHES, math.floor(window_s / _LONG_BATCH_S)))


def _binned(run: LoadRun, at_ns: Sequence[int], weights: Sequence[int], batches: int) -> Floats:
    """Sum the weights of what happened in the window, batch by batch."""
    at = np.asarray(at_ns, dtype=np.int64) - run.window_start_ns
    length_ns = run.window_end_ns - run.window_start_ns
    inside = (at >= 0) & (at < length_ns)
    index = at[inside] * batches // length_ns
    sums: Floats = np.bincount(index, weights=np.asarray(weights, dtype=float)[inside], minlength=batches).astype(float)
    return sums


def _interval(counts: Floats, window_s: float) -> Interval | None:
    """Return the interval of a rate; None for a short window, and for events so rare that batches are mostly empty."""
    if counts.sum() < _FEWEST_IN_BATCH * len(counts):
        return None
    found = batch_interval([float(count) for count in counts * len(counts) / window_s])
    return None if found is None else (max(0.0, found[0]), found[1])
