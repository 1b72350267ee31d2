import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.measure.goodput import cohort
from sweep.measure.rates import window_rates
from sweep.model import LoadRun
from tests.measure.records import load_run, request


def test_tokens_count_by_the_time_of_their_arrival() -> None:
    warm = request(start=-300, chunks=[(-200, 5), (50, 7)], counted=False, end=60)
    counted = request(start=100, chunks=[(200, 1), (300, 9)])
    cut = request(start=900, chunks=[(950, 3), (1100, 4)], status="cancelled", counted=False)
    broken = request(start=400, chunks=[(500, 2)], status="truncated")
    found = window_rates(load_run([warm, counted, cut, broken], start=-400), None)
    assert found.output_tps == pytest.approx(7 + 1 + 9 + 3 + 2)
    assert found.total_tps == pytest.approx(22 + 3 * 100)  # prompts whose first token came inside
    assert found.request_rps == pytest.approx(2)
    assert (found.goodput_rps, found.slo_attainment_frac) == (None, None)


_streams = st.lists(
    st.builds(
        request,
        chunks=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 4)), min_size=1, max_size=6).map(sorted),
        status=st.sampled_from(["ok", "cancelled", "truncated"]),
    ),
    min_size=1,
    max_size=8,
)


@given(_streams, st.integers(1, 2998))
def test_windows_side_by_side_share_the_tokens_without_loss(records: list, cut: int) -> None:
    records = [*records, request(chunks=[(0, 1)])]  # one that succeeds, so that there are rates

    def tokens(window: tuple[float, float]) -> tuple[float, float]:
        found = window_rates(load_run(records, window=window), None)
        assert found.output_tps is not None
        assert found.total_tps is not None
        length_s = (window[1] - window[0]) / 1000
        return found.output_tps * length_s, found.total_tps * length_s

    left, right, whole = tokens((0, cut)), tokens((cut, 3000)), tokens((0, 3000))
    assert np.add(left, right) == pytest.approx(whole)
    assert whole[0] == pytest.approx(sum(r.output_tokens for r in records))


@given(_streams, st.floats(0.001, 3))
def test_goodput_is_no_more_than_what_was_asked(records: list, limit_s: float) -> None:
    run = load_run([*records, request()], window=(0, 3000))
    found = window_rates(run, cohort(run.records, {"e2e_p99": limit_s}))
    assert found.goodput_rps is not None
    assert found.request_rps is not None
    assert found.goodput_rps <= found.request_rps * (1 + 1e-12)  # all of these end inside the window
    assert found.slo_attainment_frac is None or 0 <= found.slo_attainment_frac <= 1


def poisson_run(seed: int, seconds: int) -> LoadRun:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1000 / 20, size=seconds * 30))
    records = [request(start=t, chunks=[(t, 1), (t + 5, 1)]) for t in at if t < 1000 * seconds]
    return load_run(records, window=(0, 1000 * seconds))


@pytest.mark.parametrize("seconds", [15, 60])
def test_the_interval_of_a_rate_covers_it(seconds: int) -> None:
    hits = 0
    for seed in range(100):
        low, high = window_rates(poisson_run(seed, seconds), None).intervals["request_rps"]
        hits += low <= 20 <= high
    assert hits >= 88


def test_a_short_window_and_rare_events_have_no_interval() -> None:
    short = load_run([request(start=t, chunks=[(t, 1)]) for t in range(0, 9000, 10)], window=(0, 9000))
    assert window_rates(short, None).intervals == {}
    rare = load_run([request(start=t, chunks=[(t, 1)]) for t in range(0, 30_000, 2000)], window=(0, 30_000))
    assert "request_rps" not in window_rates(rare, None).intervals


def test_nothing_that_succeeded_is_no_rate_but_a_goodput_of_0() -> None:
    run = load_run([request(status="truncated"), request(status="truncated")])
    found = window_rates(run, cohort(run.records, {"ttft_p99": 1.0}))
    assert found.output_tps is found.request_rps is None
    assert (found.goodput_rps, found.slo_attainment_frac) == (0, 0)
    assert found.intervals["slo_attainment_frac"] == pytest.approx((0, 0.6576), abs=1e-3)
