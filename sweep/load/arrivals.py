"""When requests are due in an open loop: absolute offsets from a start, never rescaled to a number of requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

Process: TypeAlias = Literal["poisson", "constant", "gamma"]

_BLOCK = 1024


def unit_times(process: Process, shape: float, seed: list[int]) -> Iterator[float]:
    """Yield the arrival times of a process of one arrival a unit of time, for ever.

    gamma: gaps of that shape and the mean 1, so their coefficient of variation is 1 / sqrt(shape), and the index of
    dispersion of the counts tends to 1 / shape. This is what vLLM calls burstiness: 1 is Poisson, less is burstier.
    constant: in the middle of each unit, so that a window of whole units has no arrival at its very edge.
    """
    if process == "constant":
        number = 0
        while True:
            yield number + 0.5
            number += 1
    rng = np.random.default_rng(seed)
    shape = 1.0 if process == "poisson" else shape
    last = 0.0
    while True:
        times = last + np.cumsum(rng.gamma(shape, 1 / shape, size=_BLOCK))
        last = float(times[-1])
        yield from times.tolist()


def ramp_s(units: Iterator[float], from_rps: float, to_rps: float, length_s: float) -> Iterator[float]:
    """Let the rate change evenly from one to the other over `length_s`, and stay there.

    Each unit of time is put where the cumulated rate reaches it (time change, Çinlar 1975), so the process stays what
    it is, at a rate that moves.
    """
    slope = (to_rps - from_rps) / length_s
    whole = (from_rps + to_rps) / 2 * length_s
    for unit in units:
        if unit >= whole:
            yield length_s + (unit - whole) / to_rps
        else:
            # The root of from * t + slope / 2 * t^2 = unit, in the form that loses no digits where the slope is small.
            yield 2 * unit / (from_rps + math.sqrt(from_rps**2 + 2 * slope * unit))
