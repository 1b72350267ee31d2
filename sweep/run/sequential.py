"""When a try of a rate has shown enough: a sequential test of the SLOs, and a queue that runs away. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sweep.load.client import Tally
from sweep.measure.stability import growing
from sweep.slo import TAIL_FRAC, split_slo

Decision: TypeAlias = Literal["pass", "fail", "unstable"]

# How sure a verdict is: each of the two errors is made in at most so many tries of a hundred.
_ERROR_FRAC = 0.05
_LEAST_S = 10.0
_LEAST_LIFETIMES = 3.0  # of a request, on average: a queue shows itself no sooner
_LEAST_REQUESTS = 30
# By how much the odds of a miss may differ from what is allowed; a try is tested against all of them at once.
_ODDS_FACTORS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
_SIGMAS = 3.0
_LOOK_GROWTH = 1.25  # between two looks at the queue, since each of them may err
_BATCHES = 10
_FEWEST_BATCHES = 4


@dataclass(slots=True)
class SequentialJudge:
    """Ends a level as soon as it is sure that its SLOs are met or missed; to be called with tally after tally.

    slo: names with their limits. A percentile allows a share of misses (p99: 1 %). Whether the true share is above or
    below it is tested after every tally by mixtures of likelihood ratios, one for each direction. Such a test may be
    looked at as often as one likes (Ville's inequality: a ratio that is 1 on average reaches 20 with a probability of
    at most 1/20), which a confidence interval for a fixed number of requests may not. A level passes when all its SLOs
    are met for sure, and fails with the first that is missed for sure.

    Requests in a queue miss together, so they tell less than as many independent ones. The counts are divided by how
    much more they vary between stretches of time than independent ones would (the design effect).

    A mean has no such test: a level whose only limits are on means is not ended early but for instability. A request is
    judged when it ends, so a miss is not seen before; where answers take long, the growing number of requests under way
    is what shows an overload first.
    """

    slo: Mapping[str, float]
    _seen: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)  # name -> (elapsed, judged, missed)
    _next_look: int = 0  # number of bins at which the growth of the queue is looked at again

    def __call__(self, tally: Tally) -> Decision | None:
        for name, (judged, missed) in tally.judged.items():
            self._seen.setdefault(name, []).append((tally.elapsed_s, judged, missed))
        if tally.elapsed_s < _LEAST_S:
            return None
        if len(tally.in_flight) >= self._next_look:
            self._next_look = math.ceil(len(tally.in_flight) * _LOOK_GROWTH)
            if growing(tally.in_flight) and _rise(tally.in_flight):
                return "unstable"
        if tally.elapsed_s < _LEAST_LIFETIMES * _lifetime_s(tally):
            return None
        verdicts = [self._judge(name) for name in self.slo]
        if "fail" in verdicts:
            return "fail"
        return "pass" if verdicts and all(verdict == "pass" for verdict in verdicts) else None

    def _judge(self, name: str) -> Decision | None:
        allowed = TAIL_FRAC[split_slo(name)[2]]
        seen = self._seen.get(name, [])
        if name.endswith("mean") or not seen or seen[-1][1] < _LEAST_REQUESTS:
            return None
        _, judged, missed = seen[-1]
        share = 1 / design_effect(_batches(seen))
        if _evidence(share * missed, share * judged, allowed, _above(allowed)) > math.log(1 / _ERROR_FRAC):
            return "fail"
        if _evidence(share * missed, share * judged, allowed, _below(allowed)) > math.log(1 / _ERROR_FRAC):
            return "pass"
        return None


def _rise(in_flight: Sequence[float]) -> bool:
    """Tell whether more requests are under way than chance explains: 3 standard deviations of a Poisson number more."""
    quarter = max(1, len(in_flight) // 4)
    before, after = (sum(part) / quarter for part in (in_flight[:quarter], in_flight[-quarter:]))
    return after - before > _SIGMAS * math.sqrt(max(before, 1.0))


def _lifetime_s(tally: Tally) -> float:
    """Return how long a request is under way on average, by Little's law: number under way / rate of arrival."""
    if not tally.in_flight or not tally.due:
        return 0.0
    return sum(tally.in_flight) / len(tally.in_flight) * tally.elapsed_s / tally.due


def _above(allowed: float) -> list[float]:
    odds = allowed / (1 - allowed)
    return [odds * factor / (1 + odds * factor) for factor in _ODDS_FACTORS]


def _below(allowed: float) -> list[float]:
    odds = allowed / (1 - allowed)
    return [odds / factor / (1 + odds / factor) for factor in _ODDS_FACTORS]


def _evidence(missed: float, judged: float, allowed: float, others: Iterable[float]) -> float:
    """Return the log of the mean likelihood ratio of other shares of misses against the one that is allowed."""
    logs = [
        missed * math.log(other / allowed) + (judged - missed) * math.log((1 - other) / (1 - allowed))
        for other in others
    ]
    highest = max(logs)
    return highest + math.log(sum(math.exp(value - highest) for value in logs) / len(logs))


def _batches(seen: Sequence[tuple[float, int, int]]) -> list[tuple[int, int]]:
    """Cut what was seen into stretches of equal time: (judged, missed) of each."""
    edges = [seen[-1][0] * (i + 1) / _BATCHES for i in range(_BATCHES)]
    batches, before = [], (0, 0)
    times = [at for at, _, _ in seen]
    for edge in edges:
        _, judged, missed = seen[min(bisect_left(times, edge), len(seen) - 1)]
        batches.append((judged - before[0], missed - before[1]))
        before = (judged, missed)
    return [batch for batch in batches if batch[0] > 0]


def design_effect(batches: Sequence[tuple[int, int]]) -> float:
    """Return how much more misses vary between batches of (judged, missed) than independent ones would; at least 1."""
    judged, missed = sum(n for n, _ in batches), sum(m for _, m in batches)
    if len(batches) < _FEWEST_BATCHES or not 0 < missed < judged:
        return 1.0
    share = missed / judged
    squares = sum((m - n * share) ** 2 / n for n, m in batches)
    return max(1.0, squares / (share * (1 - share)) / (len(batches) - 1))
