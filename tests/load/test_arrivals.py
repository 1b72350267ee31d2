"""Arrival processes are what their names say, at any rate, and however they are dealt out."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sweep.load.arrivals import Process, ramp_s, unit_times

PROCESSES = st.sampled_from(["poisson", "constant", "gamma"])


def units(process: Process, count: int, shape: float = 1.0, seed: int = 4) -> np.ndarray:
    return np.array(list(islice(unit_times(process, shape, [seed]), count)))


@given(process=PROCESSES, shape=st.floats(0.1, 8), seed=st.integers(0, 99))
def test_times_never_go_back_and_repeat_with_their_seed(process: Process, shape: float, seed: int) -> None:
    times = units(process, 3000, shape, seed)
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert (times == units(process, 3000, shape, seed)).all()
    if process != "constant":
        assert (times[:10] != units(process, 10, shape, seed + 1)).any()


@pytest.mark.parametrize(
    ("process", "shape", "cv", "dispersion"),
    [("poisson", 1.0, 1.0, 1.0), ("gamma", 0.5, 2**0.5, 2.0), ("gamma", 4.0, 0.5, 0.25), ("constant", 1.0, 0.0, 0.0)],
)
def test_gaps_and_counts_are_those_of_the_process(process: Process, shape: float, cv: float, dispersion: float) -> None:
    times = units(process, 200_000, shape)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02, abs=1e-9)
    # Over bins that are long against a gap, the index of dispersion of a renewal process is cv^2.
    counts = np.bincount((times / 50).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.15, abs=1e-9)
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.01) if cv else True


def test_a_poisson_s_gaps_are_exponential() -> None:
    gaps = np.sort(np.diff(units("poisson", 20_001)))
    expected = 1 - np.exp(-gaps)
    distance = np.abs(np.arange(1, len(gaps) + 1) / len(gaps) - expected).max()
    assert distance < 1.63 / len(gaps) ** 0.5  # Kolmogorov and Smirnov's bound for 1 %


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
@pytest.mark.parametrize("workers", [1, 2, 4, 10])
def test_dealing_a_process_to_workers_keeps_it(process: Process, workers: int) -> None:
    times = units(process, 4000, 0.5)
    dealt = [list(islice(unit_times(process, 0.5, [4]), w, 4000, workers)) for w in range(workers)]
    assert sorted(t for share in dealt for t in share) == times.tolist()


def test_a_whole_window_of_constant_arrivals_has_exactly_its_rate() -> None:
    times = units("constant", 1000) / 7
    assert [((times >= at) & (times < at + 1)).sum() for at in range(100)] == [7] * 100


@settings(max_examples=30)
@given(
    process=PROCESSES,
    start=st.floats(0.1, 50),
    end=st.floats(0.1, 50),
    length_s=st.floats(1, 300),
)
def test_a_ramp_s_cumulated_rate_at_each_arrival_is_its_unit_time(
    process: Process, start: float, end: float, length_s: float
) -> None:
    expected = units(process, 2000, 0.7)
    times = np.array(list(islice(ramp_s(iter(expected.tolist()), start, end, length_s), 2000)))
    assert (np.diff(times) >= 0).all()
    within = np.minimum(times, length_s)
    cumulated = start * within + (end - start) / length_s * within**2 / 2 + np.maximum(times - length_s, 0) * end
    assert cumulated == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_ramp_from_a_rate_to_itself_is_that_rate() -> None:
    expected = units("poisson", 1000)
    assert list(islice(ramp_s(iter(expected.tolist()), 5, 5, 60), 1000)) == pytest.approx(expected / 5)
