import math
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from sweep.measure.summary import level_stats, meets, whole_run
from sweep.model import ServerStats
from tests.measure.records import load_run, request


def test_throughput_counts_tokens_by_the_time_of_their_arrival() -> None:
    warm = request(start=-300, chunks=[(-200, 5), (50, 7)], counted=False, end=60)
    counted = request(start=100, chunks=[(200, 1), (300, 9)])
    cut = request(start=900, chunks=[(950, 3), (1100, 4)], status="cancelled", counted=False)
    stats = level_stats(load_run([warm, counted, cut], start=-400), {})
    assert stats.output_tps == pytest.approx(7 + 1 + 9 + 3)
    assert stats.total_tps == pytest.approx(20 + 2 * 100)  # prompts whose first token came inside
    assert stats.request_rps == pytest.approx(2)
    assert (stats.completed, stats.failed, stats.output_tokens) == (1, 0, 10)
    assert (stats.warmup_s, stats.warmup_requests) == (pytest.approx(0.4), 1)
    assert stats.goodput_rps is None
    assert stats.valid


def test_failures_are_no_success_and_miss_every_limit() -> None:
    good = [request(start=i, chunks=[(i + 10, 1), (i + 20, 1)]) for i in range(6)]
    bad = [request(start=5, chunks=[(10, 1)], status="inband_error"), request(chunks=[], status="connect")]
    stats = level_stats(load_run([*good, *bad]), {"ttft_p99": 1.0})
    assert (stats.completed, stats.failed, stats.errors) == (6, 2, {"inband_error": 1, "connect": 1})
    assert stats.ttft_s is not None
    assert stats.ttft_s.n == 6
    assert stats.slo_attainment_frac == pytest.approx(6 / 8)
    assert stats.goodput_rps == pytest.approx(6)
    assert not stats.valid
    assert "2 of 8 requests failed" in stats.reasons[0]


def test_an_slo_limits_every_request() -> None:
    fast, slow = request(chunks=[(10, 1), (20, 1)]), request(chunks=[(10, 1), (90, 1)])
    one = request(chunks=[(10, 1)])
    assert [meets(r, {"tpot_p99": 0.05}) for r in (fast, slow, one)] == [True, False, True]
    assert [meets(r, {"ttft_p99": 0.005}) for r in (fast, slow, one)] == [False] * 3
    assert [meets(r, {"itl_p99": 0.05, "e2e_mean": 0.1}) for r in (fast, slow)] == [True, False]


def test_an_open_loop_is_judged_from_its_schedule() -> None:
    late = request(sched=-500, start=0, chunks=[(10, 1), (20, 1)])
    assert not meets(late, {"ttft_p99": 0.1})
    assert not meets(late, {"e2e_p99": 0.1})
    stats = level_stats(load_run([late]), {"ttft_p99": 0.1})
    assert stats.slo_attainment_frac == 0
    assert stats.ttft_sched_s is not None
    assert stats.ttft_sched_s.p50 == pytest.approx(0.51)
    assert stats.client is not None
    assert stats.client.send_lag_p99_s == pytest.approx(0.5)


def test_what_an_ideal_prefix_cache_could_have_served() -> None:
    records = [
        request(start=-9, counted=False, group=0),
        request(start=1, group=0),
        request(start=2, group=1),
        request(start=3, group=1),
    ]
    stats = level_stats(load_run(records, prefix_tokens=60), {})
    assert stats.prefix_offered_frac == pytest.approx(2 * 60 / 300)
    assert level_stats(load_run([request()]), {}).prefix_offered_frac == 0


def test_worthless_figures_are_not_valid() -> None:
    stats = level_stats(load_run([request(counted=False, status="connect", chunks=[])]), {})
    assert not stats.valid
    assert "no request was counted; before that: connect 1" in stats.reasons[0]


def test_a_server_that_counts_otherwise_makes_the_level_invalid() -> None:
    run = load_run(
        [request(start=i, chunks=[(i + 10, 50), (i + 20, 50)]) for i in range(0, 9000, 100)], window=(0, 10_000)
    )
    assert level_stats(run, {}, ServerStats(generation_tokens=9500)).valid
    stats = level_stats(run, {}, ServerStats(generation_tokens=20_000))
    assert not stats.valid
    assert "somebody else uses the server" in stats.reasons[0]


def test_cautions_leave_a_level_valid() -> None:
    waiting = [request(sched=i, start=i, chunks=[(i + 2000, 1)]) for i in range(0, 900, 100)]
    done = request(sched=0, start=0, chunks=[(20, 1)])
    stats = level_stats(load_run([done, *waiting], steady=False, cpu_s=0.99), {})
    assert stats.valid
    assert len(stats.reasons) == 3
    assert "the load client was busy" in stats.reasons[1]
    assert "10 requests came in the window, 1 were finished" in stats.reasons[2]


def test_the_whole_run_is_vllms_arithmetic() -> None:
    records = [
        request(start=0, send=5, chunks=[(10, 1), (20, 2), (30, 1)], end=35),
        request(start=10, chunks=[(40, 1), (60, 1)], end=100),
        request(start=12, chunks=[(40, 1)], status="truncated", end=50),
        request(start=-50, counted=False),
    ]
    found = whole_run(load_run(records), {"ttft_p99": 0.02})
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 1, 6)
    assert found["duration"] == pytest.approx(0.1)
    assert found["output_throughput"] == pytest.approx(60)
    assert found["mean_ttft_ms"] == pytest.approx((10 + 30) / 2)  # from the start, not from the first byte sent
    assert found["mean_tpot_ms"] == pytest.approx((20 / 3 + 20) / 2)
    assert found["mean_itl_ms"] == pytest.approx((10 + 10 + 20) / 3)  # gaps of events, whatever they carried
    assert found["request_goodput"] == pytest.approx(10)


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    return [value] if isinstance(value, float) else []


@given(
    st.lists(
        st.builds(
            request,
            start=st.floats(0, 900),
            chunks=st.lists(st.tuples(st.floats(900, 1200), st.integers(1, 4)), max_size=4).map(sorted),
            status=st.sampled_from(["truncated", "connect", "cancelled"]),
            counted=st.booleans(),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_there_is_never_a_nan_and_the_parts_add_up(records: list, with_good: bool) -> None:
    run = load_run([*records, *([request()] if with_good else [])])
    stats = level_stats(run, {"ttft_p99": 1})
    assert not [n for n in numbers(asdict(stats)) + numbers(whole_run(run)) if math.isnan(n) or math.isinf(n)]
    assert stats.completed + stats.failed == sum(r.counted and r.status != "cancelled" for r in run.records)
    assert (stats.ttft_s is None) == (not with_good)
