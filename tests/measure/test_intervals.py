import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.measure.intervals import batch_interval, lag1, mean_interval, percentile_interval, student, wilson

RUNS = 400


def covered(find, truth: float, draw) -> float:
    hits = 0
    for seed in range(RUNS):
        found = find(draw(np.random.default_rng(seed)))
        hits += found is not None and found[0] <= truth <= found[1]
    return hits / RUNS


@pytest.mark.parametrize(("p", "n"), [(0.5, 30), (0.5, 1000), (0.9, 64), (0.95, 130), (0.99, 662)])
def test_order_statistics_cover_the_percentile_of_a_skewed_distribution(p: float, n: int) -> None:
    truth = -math.log(1 - p)
    found = covered(lambda v: percentile_interval(np.sort(v), p), truth, lambda rng: rng.exponential(size=n))
    assert 0.93 <= found <= 1.0


def test_the_ranks_are_those_of_the_binomial_distribution() -> None:
    values = np.arange(1.0, 101.0)
    assert percentile_interval(values, 0.5) == (40.0, 61.0)  # the textbook's ranks for the median of 100
    assert percentile_interval(np.arange(1.0, 7.0), 0.5) == (1.0, 6.0)
    assert percentile_interval(np.arange(1.0, 6.0), 0.5) is None
    assert percentile_interval(np.arange(367.0), 0.99) is None
    assert percentile_interval(np.arange(368.0), 0.99) is not None
    assert percentile_interval(np.zeros(0), 0.5) is None


def test_the_exact_and_the_approximate_ranks_meet() -> None:
    for p in (0.5, 0.9, 0.99):
        exact = percentile_interval(np.arange(10_000.0), p)
        rough = percentile_interval(np.arange(10_001.0), p)
        assert exact == pytest.approx(rough, abs=3)


def test_fewer_independent_values_make_a_wider_interval() -> None:
    values = np.arange(10_000.0)
    narrow, wide = percentile_interval(values, 0.5), percentile_interval(values, 0.5, independent=100)
    assert narrow is not None
    assert wide == (3900.0, 6099.0)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert percentile_interval(values, 0.99, independent=100) is None


def test_batch_means_cover_the_mean() -> None:
    assert 0.93 <= covered(mean_interval, 1.0, lambda rng: rng.exponential(size=300)) <= 0.99


def test_batch_means_cover_the_mean_of_a_series_whose_neighbours_are_alike() -> None:
    def autoregressive(rng: np.random.Generator) -> np.ndarray:
        noise, values, last = rng.standard_normal(1000), np.empty(1000), 0.0
        for i, step in enumerate(noise):
            last = 0.8 * last + step
            values[i] = last
        return values

    naive = covered(
        lambda v: (v.mean() - 1.96 * v.std() / 1000**0.5, v.mean() + 1.96 * v.std() / 1000**0.5), 0.0, autoregressive
    )
    assert naive < 0.6
    assert covered(mean_interval, 0.0, autoregressive) > 0.92


def test_a_drift_has_no_interval_and_a_constant_has_a_point() -> None:
    assert batch_interval([float(i) for i in range(40)]) is None
    assert batch_interval([0.1] * 12) == pytest.approx((0.1, 0.1))
    assert batch_interval([1.0] * 9) is None
    assert mean_interval(np.arange(49.0)) is None
    assert lag1(np.full(20, 0.1)) == 0


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilsons_interval_holds_the_share_and_stays_within_0_and_1(hits: int, n: int) -> None:
    hits = min(hits, n)
    found = wilson(hits, n)
    assert found is not None
    low, high = found
    assert 0 <= low <= hits / n <= high <= 1
    mirrored = wilson(n - hits, n)
    assert mirrored is not None
    assert (1 - high, 1 - low) == pytest.approx(mirrored)


def test_wilsons_interval_is_the_one_of_the_books() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) is None


def test_students_t() -> None:
    assert [student(v) for v in (5, 9, 19, 29)] == pytest.approx([2.5706, 2.2622, 2.0930, 2.0452], rel=2e-3)
