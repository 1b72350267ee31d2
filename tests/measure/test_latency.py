import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.measure.latency import dist, e2e_s, e2e_sched_s, itl_s, tpot_s, ttft_s, ttft_sched_s
from tests.measure.records import MS, request


def test_definitions_on_one_request() -> None:
    record = request(start=0, send=1, chunks=[(11, 1), (15, 2), (21, 3)], sched=-4)
    assert ttft_s(record) == pytest.approx(0.010)
    assert ttft_sched_s(record) == pytest.approx(0.015)
    assert e2e_s(record) == pytest.approx(0.020)
    assert e2e_sched_s(record) == pytest.approx(0.025)
    assert tpot_s(record) == pytest.approx(0.010 / 5)
    assert itl_s(record) == pytest.approx([0.002] * 2 + [0.002] * 3)


def test_what_was_not_measured_is_none() -> None:
    one = request(chunks=[(5, 1)])
    assert tpot_s(one) is None
    assert itl_s(one) == []
    assert ttft_sched_s(one) is None
    nothing = request(chunks=[], status="empty")
    assert ttft_s(nothing) is e2e_s(nothing) is tpot_s(nothing) is None
    assert dist([]) is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_distribution_is_numpys(values: list[float]) -> None:
    found = dist(values)
    assert found is not None
    assert found.n == len(values)
    assert (found.p50, found.p99) == pytest.approx(tuple(np.percentile(values, [50, 99])))
    assert min(values) <= found.p50 <= found.p90 <= found.p95 <= found.p99 <= max(values)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 4)), min_size=2, max_size=30))
def test_inter_token_latencies_add_up_to_the_decode_time(steps: list[tuple[int, int]]) -> None:
    at, chunks = 0, []
    for gap, count in steps:
        at += gap
        chunks.append((at, count))
    record = request(chunks=chunks)
    gaps = itl_s(record)
    assert sum(gaps) == pytest.approx((chunks[-1][0] - chunks[0][0]) * MS / 1e9)
    assert len(gaps) == sum(count for _, count in chunks[1:])
    assert tpot_s(record) == pytest.approx(np.mean(gaps))
