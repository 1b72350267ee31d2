"""When a request's tokens are due, as a pure function of a seed and the request's ordinal number."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """TTFT and ITL: constant where sigma is 0, else lognormal with that median and sigma; and now and then a stall.

    mode: "spread" (every stream for itself), or "burst": what is due is written at the next multiple of step_s, as by
    an engine that finishes the tokens of all its streams at once.
    """

    seed: int = 0
    ttft_s: float = 0.05
    ttft_sigma: float = 0.0
    itl_s: float = 0.02
    itl_sigma: float = 0.0
    stall_frac: float = 0.0  # of the gaps between tokens
    stall_s: float = 0.0
    mode: Literal["spread", "burst"] = "spread"
    step_s: float = 0.0  # 0: as long as an ITL


class Schedule:
    """Deadlines of one request, each computed when it is asked for: a whole stream at once would take too long."""

    __slots__ = ("_at_ns", "_random", "_step_ns", "_timing")

    def __init__(self, timing: Timing, ordinal: int, received_ns: int) -> None:
        self._timing = timing
        self._random = random.Random((timing.seed << 40) ^ ordinal)
        self._at_ns = received_ns
        self._step_ns = round((timing.step_s or timing.itl_s) * _NS) if timing.mode == "burst" else 0

    def first_ns(self) -> int:
        """Return when the first token is due."""
        return self._advance(self._draw_s(self._timing.ttft_s, self._timing.ttft_sigma))

    def later_ns(self, tokens: int) -> int:
        """Return when the next chunk is due that has so many tokens."""
        timing = self._timing
        gap_s = 0.0
        for _ in range(tokens):
            gap_s += self._draw_s(timing.itl_s, timing.itl_sigma)
            if timing.stall_frac and self._random.random() < timing.stall_frac:
                gap_s += timing.stall_s
        return self._advance(gap_s)

    def _advance(self, gap_s: float) -> int:
        self._at_ns += round(gap_s * _NS)
        return self._at_ns if not self._step_ns else -(-self._at_ns // self._step_ns) * self._step_ns

    def _draw_s(self, median_s: float, sigma: float) -> float:
        return median_s * math.exp(sigma * self._random.gauss(0, 1)) if sigma else median_s
