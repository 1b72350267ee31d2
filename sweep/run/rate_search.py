"""The highest rate of requests that still meets the SLOs: which rates are tried, and what they show together. Pure."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sweep.load.workload import Level
from sweep.model import LevelStats, LoadRun
from sweep.search.objectives import Objective

# A short closed loop tells where to begin. So many requests under way saturate a server or come close; a server that
# could carry more is found out by doubling.
SATURATING = Level("c=64", concurrency=64)
SATURATED_S = 10.0
# Where TTFT and TPOT are limited, the highest rate is a part of what the server carries at most.
_START_FRAC = 0.7
TRIED_RATES = 8  # about
_BRACKET = 2.0  # by which a rate is raised or lowered until one has passed and one has failed


@dataclass(frozen=True, slots=True)
class Bracket:
    """What a search knows: the highest rate that passed and the lowest above it that did not; None where none did."""

    low_rps: float | None
    high_rps: float | None


class RateSearch:
    """Says which rate to try next. Rates have three digits, so that the name of a level tells the whole of it.

    The first rates differ by a factor of two, until one has passed and one has failed; then the middle of the bracket
    (on the log of the rate) is tried until its ends lie within `ratio`. A rate above the highest that was tried is
    never the answer.

    Answers near the limit are noisy, so a rate may fail below one that passes. All answers are seen together through
    their best non-increasing fit (isotonic regression): the share of passes among neighbours that contradict each
    other. A rate counts as passed where that share is above one half. At one half the place between the two that
    contradict each other is tried next; if none can be, the lower rates win.
    """

    def __init__(self, start_rps: float, ratio: float = 1.1, most_probes: int = 10) -> None:
        if not start_rps > 0 or not ratio > 1:
            raise ValueError(f"a search cannot start at {start_rps} requests a second with a ratio of {ratio}")
        self._start, self._ratio, self._most = start_rps, ratio, most_probes
        self._answers: list[tuple[float, bool]] = []  # rates ascending

    def tell(self, rate_rps: float, *, passed: bool) -> None:
        insort(self._answers, (rate_rps, passed))

    def next(self) -> float | None:
        """Return the rate to try, in requests a second; None when the answer is known or the tries are used up."""
        if len(self._answers) >= self._most:
            return None
        if not self._answers:
            return _three_digits(self._start)
        low_rps, high_rps = self.bracket.low_rps, self.bracket.high_rps
        if (tie := self._tie()) is not None:
            return tie
        if low_rps is None:
            return _three_digits(self._answers[0][0] / _BRACKET)
        if high_rps is None:
            return _three_digits(low_rps * _BRACKET)
        return None if high_rps / low_rps <= self._ratio else _between(low_rps, high_rps)

    @property
    def bracket(self) -> Bracket:
        shares = self._shares()
        low = max((rate for rate, share in shares.items() if share > 0.5), default=None)
        high = min((rate for rate, share in shares.items() if share <= 0.5), default=None)
        return Bracket(low, high)

    def _shares(self) -> dict[float, float]:
        """Pool adjacent violators: rate -> share of passes, non-increasing."""
        blocks: list[list[tuple[float, bool]]] = []
        for answer in self._answers:
            blocks.append([answer])
            while len(blocks) > 1 and _share(blocks[-2]) <= _share(blocks[-1]):
                blocks[-2:] = [blocks[-2] + blocks[-1]]
        return {rate: _share(block) for block in blocks for rate, _ in block}

    def _tie(self) -> float | None:
        """Return a rate between two that contradict each other, where passes and failures are equally many."""
        shares = self._shares()
        tied = [(rate, passed) for rate, passed in self._answers if shares[rate] == 0.5]
        contradictions = [(low, high) for (low, first), (high, then) in pairwise(tied) if not first and then]
        return next((rate for low, high in contradictions if (rate := _between(low, high)) is not None), None)


def _share(block: Sequence[tuple[float, bool]]) -> float:
    return sum(passed for _, passed in block) / len(block)


def _between(low_rps: float, high_rps: float) -> float | None:
    """Return the middle on the log scale; None where no three digits lie between."""
    middle = _three_digits(math.sqrt(low_rps * high_rps))
    return middle if low_rps < middle < high_rps else None


def _three_digits(rate_rps: float) -> float:
    return float(f"{rate_rps:.3g}")


def start_rps(stats: LevelStats, run: LoadRun) -> float:
    """Return the rate to begin with, from a closed loop that saturates the server.

    By tokens, since few long answers end in a short window.
    """
    asked = [record.requested_tokens for record in run.records]
    if not stats.output_tps or not asked:
        return 1.0
    return _START_FRAC * stats.output_tps * len(asked) / sum(asked)


def met(stats: LevelStats, slo: Mapping[str, float]) -> bool:
    """Tell whether a level meets its SLOs: for certain, or where that could not be had, by what was measured."""
    return stats.valid and stats.completed > 0 and Objective(maximize="rate_rps").with_limits(slo).met(stats)


def settled(levels: Mapping[float, LevelStats], bracket: Bracket, slo: Mapping[str, float]) -> list[LevelStats]:
    """Return the levels of a search in ascending order, with what a reader should know of them.

    A rate that met its SLOs by chance, as those below it tell, is not valid: it must not be the answer.
    """
    found = []
    for rate_rps, stats in sorted(levels.items()):
        doubts = list(_doubts(rate_rps, stats, bracket))
        chance = met(stats, slo) and (bracket.low_rps is None or rate_rps > bracket.low_rps)
        if chance:
            doubts.insert(0, "lower rates missed the SLOs, so it met them by chance")
        found.append(replace(stats, valid=stats.valid and not chance, reasons=(*doubts, *stats.reasons)))
    return found


def _doubts(rate_rps: float, stats: LevelStats, bracket: Bracket) -> Iterable[str]:
    if stats.verdict is None and stats.valid:
        yield f"{stats.window_s:.0f} s were too short to be sure of the SLOs, so the measured latencies decided"
    if rate_rps == bracket.low_rps and stats.valid:
        yield (
            "the highest rate that was tried, so the limit may lie above it"
            if bracket.high_rps is None
            else f"the limit lies between {rate_rps:g} and {bracket.high_rps:g} req/s"
        )
