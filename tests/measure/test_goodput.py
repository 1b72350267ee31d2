import pytest
from hypothesis import given, strategies as st

from sweep.measure.goodput import cohort, misses
from sweep.measure.summary import level_stats
from tests.measure.records import load_run, request


def test_an_slo_limits_every_request() -> None:
    fast, slow = request(chunks=[(10, 1), (20, 1)]), request(chunks=[(10, 1), (90, 1)])
    one = request(chunks=[(10, 1)])
    for limits, expected in (
        ({"tpot_p99": 0.05}, [False, True, False]),
        ({"ttft_p99": 0.005}, [True, True, True]),
        ({"itl_p99": 0.05, "e2e_mean": 0.1}, [False, True, False]),
    ):
        assert [any(misses(r, limits).values()) for r in (fast, slow, one)] == expected
    assert misses(slow, {"ttft_p99": 0.02, "e2e_p50": 0.01}) == {"ttft_p99": False, "e2e_p50": True}


def test_what_failed_has_missed_everything() -> None:
    failed = request(chunks=[(1, 1)], status="inband_error")
    assert misses(failed, {"ttft_p99": 9.0, "tpot_p99": 9.0}) == {"ttft_p99": True, "tpot_p99": True}
    assert [r.status for r in cohort([failed, request(chunks=[], status="timeout_ttft")], {}).missed] == [
        "inband_error",
        "timeout_ttft",
    ]


def test_an_open_loop_is_judged_from_its_schedule() -> None:
    late = request(sched=-500, start=0, chunks=[(10, 1), (20, 1)])
    assert misses(late, {"ttft_p99": 0.1, "e2e_p99": 0.1, "tpot_p99": 0.1}) == {
        "ttft_p99": True,
        "e2e_p99": True,
        "tpot_p99": False,
    }


def test_a_limit_of_a_class_is_for_that_class() -> None:
    limits = {"e2e_p99": 1.0, "chat.ttft_p99": 0.005, "code.ttft_p99": 0.1}
    assert misses(request(kind="chat"), limits) == {"e2e_p99": False, "chat.ttft_p99": True}
    assert misses(request(kind="code"), limits) == {"e2e_p99": False, "code.ttft_p99": False}
    assert misses(request(), limits) == {"e2e_p99": False}


@pytest.mark.parametrize(
    ("chunks", "end", "requested", "expected"),
    [
        ([], 60, 99, {}),
        ([], 150, 99, {"ttft_p99": True}),
        ([(50, 1)], 150, 99, {"ttft_p99": False}),
        ([(150, 1)], 160, 99, {"ttft_p99": True}),
        ([(50, 1)], 900, 99, {"ttft_p99": False, "e2e_p99": True}),
        ([(50, 1)], 300, 5, {"ttft_p99": False, "tpot_p99": True}),
    ],
)
def test_of_what_was_cut_off_only_the_certain_is_told(chunks, end, requested, expected) -> None:
    record = request(chunks=chunks, end=end, status="cancelled", requested_tokens=requested)
    limits = {"ttft_p99": 0.1, "e2e_p99": 0.5, "tpot_p99": 0.05, "itl_p99": 0.01}
    assert misses(record, limits) == expected
    found = cohort([record], limits)
    assert len(found.missed) == any(expected.values())
    assert len(found.cut_off) == (not any(expected.values()))


@given(
    st.lists(
        st.builds(
            request,
            chunks=st.lists(st.tuples(st.floats(1, 900), st.integers(1, 3)), min_size=1, max_size=4).map(sorted),
            status=st.sampled_from(["ok", "cancelled", "truncated"]),
            counted=st.booleans(),
            kind=st.sampled_from([None, "chat"]),
        ),
        max_size=8,
    )
)
def test_every_counted_request_is_in_one_place(records: list) -> None:
    found = cohort(records, {"ttft_p99": 0.3, "chat.e2e_p99": 0.6})
    assert len(found.good) + len(found.missed) + len(found.cut_off) == sum(r.counted for r in records)
    assert all(r.status == "ok" for r in found.good)


@pytest.mark.parametrize("limit_s", [0.25, 0.5, 1.0, 1.5])
def test_a_freeze_costs_the_requests_that_came_too_early_in_it(limit_s: float) -> None:
    """A server that freezes for 2 s makes those wait that come in it: of 20 a second, 20 x (2 - limit)."""
    records = []
    for i in range(600):
        due = i * 50.0
        first = (12_000 if 10_000 <= due < 12_000 else due) + 10
        records.append(request(sched=due, start=due, chunks=[(first, 1), (first + 10, 1)]))
    run = load_run(records, window=(0, 30_000), level="r=20", rate_rps=20.0)
    stats = level_stats(run, {"ttft_p99": limit_s})
    assert stats.goodput_rps is not None
    assert stats.slo_attainment_frac is not None
    assert 600 - stats.goodput_rps * 30 == pytest.approx(20 * (2 - limit_s), abs=2)
    assert 600 * (1 - stats.slo_attainment_frac) == pytest.approx(20 * (2 - limit_s), abs=2)
    assert stats.ttft_sched_s is not None
    assert stats.ttft_sched_s.p99 > 1.5
