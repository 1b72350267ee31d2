"""A made-up server for the rate search: slots that each serve one request at a time, and Poisson arrivals (M/D/c)."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from dataclasses import dataclass

from sweep.load.client import Judge, Tally

LIMIT_S = 0.35  # of TTFT
SLO = {"ttft_p99": LIMIT_S}
TICK_S = 0.5


@dataclass(frozen=True)
class Queue:
    """Every request takes `service_s` once it has a slot; its first token comes `first_s` after that."""

    slots: int
    service_s: float
    first_s: float = 0.05
    warmup_s: float = 10.0
    bin_s: float = 0.5

    @property
    def capacity_rps(self) -> float:
        return self.slots / self.service_s

    def serve(self, rate_rps: float, seconds: float, seed: int) -> list[tuple[float, float, float]]:
        """Return (due at, TTFT, ended at) of every request; the warm-up's are due before 0."""
        rng = random.Random(seed)
        free = [-self.warmup_s] * self.slots
        now, served = -self.warmup_s, []
        while (now := now + rng.expovariate(rate_rps)) < seconds:
            start = max(now, heapq.heappop(free))
            heapq.heappush(free, start + self.service_s)
            served.append((now, start + self.first_s - now, start + self.service_s))
        return served

    def missed_frac(self, rate_rps: float) -> float:
        served = self.serve(rate_rps, 8000, seed=1)
        return sum(ttft_s > LIMIT_S for _, ttft_s, _ in served) / len(served)

    def highest_rps(self, allowed: float = 0.01) -> float:
        """Return the highest rate at which no more than the allowed share of requests misses the limit."""
        low, high = 0.1 * self.capacity_rps, self.capacity_rps
        while high / low > 1.005:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.missed_frac(middle) <= allowed else (low, middle)
        return low

    def try_rate(self, rate_rps: float, judge: Judge, seed: int, seconds: float = 60) -> tuple[str, float]:
        """Show a judge what it would see of a level; return its verdict, or what was measured, and the time it took."""
        served = self.serve(rate_rps, seconds, seed)
        due = sorted(at for at, _, _ in served)
        ended = sorted(end for _, _, end in served)
        counted = sorted((end, ttft_s > LIMIT_S) for at, ttft_s, end in served if at >= 0)
        counted_due = [at for at in due if at >= 0]
        in_flight: list[float] = []
        judged = missed = 0
        for tick in range(1, round(seconds / TICK_S) + 1):
            now = tick * TICK_S
            while judged < len(counted) and counted[judged][0] <= now:
                missed += counted[judged][1]
                judged += 1
            if now % self.bin_s == 0:
                in_flight.append(bisect_right(due, now) - bisect_right(ended, now))
            taken = bisect_right(counted_due, now)
            tally = Tally(now, taken, taken - judged, {"ttft_p99": (judged, missed)}, tuple(in_flight), self.bin_s)
            if verdict := judge(tally):
                return verdict, now
        share = sum(miss for _, miss in counted) / len(counted)
        return ("measured pass" if share <= 0.01 else "measured fail"), seconds
