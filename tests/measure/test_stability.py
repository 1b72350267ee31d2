import heapq

import numpy as np
import pytest

from sweep.measure.arrivals import arrivals
from sweep.measure.stability import backlog, growing, in_flight, stable
from sweep.model import LoadRun
from tests.measure.records import load_run, request

PLACES, SERVICE_S = 16, 1.0


def queue(load: float, seconds: int, seed: int) -> LoadRun:
    """Poisson arrivals at `load` times what 16 places can serve. A stable one is warm, too much has just begun."""
    rng = np.random.default_rng(seed)
    warm_s = 40 if load < 1 else 5
    rate = load * PLACES / SERVICE_S
    free = [0.0] * PLACES
    records, at = [], 0.0
    while (at := at + rng.exponential(1 / rate)) < warm_s + seconds:
        begin = max(at, heapq.heappop(free))
        end = begin + rng.gamma(4, SERVICE_S / 4)
        heapq.heappush(free, end)
        due, first, last = (1000 * (t - warm_s) for t in (at, begin + 0.02, end))
        records.append(request(sched=due, start=due, chunks=[(first, 1), (last, 1)], counted=due >= 0))
    window = (0, 1000 * seconds)
    return load_run(records, window=window, start=-1000 * warm_s, level=f"r={rate:g}", rate_rps=rate)


@pytest.mark.parametrize("seconds", [30, 60])
def test_too_much_load_is_seen_and_a_busy_queue_is_not_blamed(seconds: int) -> None:
    verdicts = {load: [stable(queue(load, seconds, seed)) for seed in range(20)] for load in (0.6, 0.85, 1.3)}
    assert verdicts[1.3] == [False] * 20
    assert verdicts[0.6].count(False) <= 1
    assert verdicts[0.85].count(False) <= 2


def test_a_load_that_fills_is_no_queue_that_grows() -> None:
    """Answers of 9 s at 40 requests a second, measured after a warm-up of 2 s only."""
    records = [request(sched=t, start=t, chunks=[(t + 50, 1), (t + 9000, 1)]) for t in range(-2000, 40_000, 25)]
    window = {"window": (0, 40_000), "level": "r=40", "rate_rps": 40.0}
    assert stable(load_run(records, start=-2000, **window)) is True
    assert stable(load_run(records, start=-40_000, **window)) is False  # as if it had been filled before


def test_growing_needs_a_trend_that_is_certain_and_large() -> None:
    rng = np.random.default_rng(1)
    line = np.arange(60.0)
    assert growing(list(line + 5))
    assert not growing(list(60 - line))
    assert not growing([7.0] * 60)
    assert not growing(list(100 + line / 10))  # 6 %
    assert not growing(list(line[:19]))
    walk = [growing(list(100 + rng.standard_normal(60).cumsum())) for _ in range(40)]
    assert sum(walk) <= 6


def test_a_backlog_is_more_than_chance() -> None:
    assert not backlog(100, 71)
    assert backlog(100, 69)
    assert not backlog(0, 0)


def test_requests_in_flight_by_half_seconds() -> None:
    run = load_run(
        [request(start=-100, end=700, chunks=[(1, 1)]), request(sched=250, start=300, end=1500)], window=(0, 2000)
    )
    assert in_flight(run) == pytest.approx([1.5, 1.4, 1.0, 0.0])


def test_what_cannot_be_said_is_none() -> None:
    assert stable(load_run([request()], window=(0, 30_000))) is None  # a closed loop
    short = queue(1.3, 5, 0)
    assert stable(short) is None
    assert stable(load_run(short.records, window=(0, 5000), verdict="unstable")) is False
    assert stable(load_run(queue(1.3, 30, 0).records, window=(0, 30_000), level="r=2..20")) is None


def test_arrivals_are_described_by_when_they_were_sent() -> None:
    constant = [request(sched=t, start=t, send=t + 0.1) for t in range(0, 30_000, 50)]
    found = arrivals(load_run(constant, window=(0, 30_000), rate_rps=20.0))
    assert found is not None
    assert (found.asked_rps, found.achieved_rps) == (20, 20)
    assert (found.gap_cv, found.dispersion) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-2))
    times = np.cumsum(np.random.default_rng(0).exponential(50, 4000))
    poisson = [request(sched=t, start=t) for t in times if t < 120_000]
    found = arrivals(load_run(poisson, window=(0, 120_000), rate_rps=20.0))
    assert found is not None
    assert (found.gap_cv, found.dispersion) == (pytest.approx(1, abs=0.1), pytest.approx(1, abs=0.35))
    assert arrivals(load_run(constant)) is None
    few = arrivals(load_run(constant[:5], window=(0, 5000), rate_rps=20.0))
    assert few is not None
    assert few.gap_cv is few.dispersion is None
