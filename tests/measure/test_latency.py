import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.measure.latency import (
    dist,
    e2e_s,
    e2e_sched_s,
    gap_dist,
    icl_s,
    itl_s,
    tpot_s,
    ttfot_s,
    ttft_s,
    ttft_sched_s,
)
from tests.measure.records import MS, request


def test_definitions_on_one_request() -> None:
    record = request(start=0, send=1, chunks=[(11, 1), (15, 2), (21, 3)], sched=-4, answer=15)
    assert ttft_s(record) == pytest.approx(0.010)
    assert ttft_sched_s(record) == pytest.approx(0.015)
    assert ttfot_s(record) == pytest.approx(0.014)
    assert e2e_s(record) == pytest.approx(0.020)
    assert e2e_sched_s(record) == pytest.approx(0.025)
    assert tpot_s(record) == pytest.approx(0.010 / 5)
    assert list(icl_s(record)) == pytest.approx([0.004, 0.006])
    assert list(itl_s(record)) == pytest.approx([0.002] * 2 + [0.002] * 3)


def test_what_was_not_measured_is_none() -> None:
    one = request(chunks=[(5, 1)])
    assert tpot_s(one) is ttft_sched_s(one) is ttfot_s(one) is None
    assert len(itl_s(one)) == len(icl_s(one)) == 0
    bundled = request(chunks=[(5, 8)])
    assert tpot_s(bundled) is None
    nothing = request(chunks=[], status="empty")
    assert ttft_s(nothing) is e2e_s(nothing) is tpot_s(nothing) is None
    assert dist([]) is gap_dist([one, bundled], itl_s) is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_distribution_is_numpys(values: list[float]) -> None:
    found = dist(values)
    assert found is not None
    assert found.n == len(values)
    assert (found.p50, found.p99) == pytest.approx(tuple(np.percentile(values, [50, 99])))
    assert min(values) <= found.p50 <= found.p90 <= found.p95 <= found.p99 <= max(values)
    for name, (low, high) in found.ci.items():
        assert low <= getattr(found, name) * (1 + 1e-9)
        assert getattr(found, name) <= high * (1 + 1e-9)


def test_few_values_have_no_interval_and_are_marked() -> None:
    five, forty, many = (dist(np.arange(float(n))) for n in (5, 40, 700))
    assert five is not None
    assert forty is not None
    assert many is not None
    assert (five.ci, five.low_n) == ({}, ("p50", "p90", "p95", "p99"))
    assert set(forty.ci) == {"p50", "p90"}
    assert forty.low_n == ("p90", "p95", "p99")
    assert {"p50", "p90", "p95", "p99"} <= set(many.ci)
    assert many.low_n == ()


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 4)), min_size=2, max_size=30))
def test_inter_token_latencies_add_up_to_the_decode_time(steps: list[tuple[int, int]]) -> None:
    at, chunks = 0, []
    for gap, count in steps:
        at += gap
        chunks.append((at, count))
    record = request(chunks=chunks)
    gaps = itl_s(record)
    assert sum(gaps) == pytest.approx((chunks[-1][0] - chunks[0][0]) * MS / 1e9)
    assert sum(icl_s(record)) == pytest.approx(sum(gaps))
    assert len(gaps) == sum(count for _, count in chunks[1:])
    assert tpot_s(record) == pytest.approx(np.mean(gaps))


def test_gaps_of_one_answer_count_as_one_in_an_interval() -> None:
    rng = np.random.default_rng(0)
    answers = []
    for pace in rng.uniform(5, 50, 30):
        answers.append(request(chunks=[(i * pace, 1) for i in range(200)]))
    gaps = np.concatenate([itl_s(answer) for answer in answers])
    found, naive = gap_dist(answers, itl_s), dist(gaps)
    assert found is not None
    assert naive is not None
    assert found.n == naive.n == 30 * 199
    assert found.ci["p50"][1] - found.ci["p50"][0] > 5 * (naive.ci["p50"][1] - naive.ci["p50"][0])
    assert "p99" not in found.ci
