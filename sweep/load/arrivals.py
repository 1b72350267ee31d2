"""When requests are due in an open loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def poisson_offsets_s(rate_rps: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process, in seconds from its start, for ever.

    They are absolute: whoever is late for one is not late for the next, and no arrival is left out.
    """
    rng = np.random.default_rng(seed)
    last = 0.0
    while True:
        times = last + np.cumsum(rng.exponential(1 / rate_rps, size=1024))
        last = float(times[-1])
        yield from times.tolist()
