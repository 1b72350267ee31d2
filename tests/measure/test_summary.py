import math
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from sweep.measure.parity import whole_run
from sweep.measure.summary import level_stats
from tests.measure.records import load_run, request


def test_a_level_in_figures() -> None:
    warm = request(start=-300, chunks=[(-200, 5), (50, 7)], counted=False, end=60)
    counted = request(start=100, chunks=[(200, 1), (300, 9)], answer=300)
    cut = request(start=900, chunks=[(950, 3), (1100, 4)], status="cancelled")
    stats = level_stats(load_run([warm, counted, cut], start=-400), {})
    assert stats.output_tps == pytest.approx(7 + 1 + 9 + 3)
    assert stats.request_rps == pytest.approx(2)
    assert (stats.completed, stats.failed, stats.cut_off, stats.output_tokens) == (1, 0, 1, 10)
    assert (stats.warmup_s, stats.warmup_requests) == (pytest.approx(0.4), 1)
    assert stats.goodput_rps is stats.slo_attainment_frac is None
    assert stats.icl_s is not None
    assert stats.icl_s.p50 == pytest.approx(0.1)
    assert stats.itl_s is not None
    assert stats.itl_s.p50 == pytest.approx(0.1 / 9)
    assert stats.ttfot_s is not None
    assert stats.ttfot_s.p50 == pytest.approx(0.2)
    assert (stats.stable, stats.arrivals, stats.rate_rps, stats.verdict) == (None, None, None, None)
    assert stats.kinds == {}
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


def test_a_mix_has_the_figures_of_each_class() -> None:
    chat = [request(start=i, chunks=[(i + 10, 1), (i + 20, 1)], kind="chat") for i in range(8)]
    code = [request(start=i, chunks=[(i + 100, 1), (i + 300, 1)], kind="code") for i in range(4)]
    broken = request(status="truncated", kind="code")
    stats = level_stats(load_run([*chat, *code, broken]), {"chat.ttft_p99": 0.005, "code.ttft_p99": 1.0})
    assert list(stats.kinds) == ["chat", "code"]
    found = stats.kinds["code"]
    assert (found.completed, found.failed, found.slo_attainment_frac) == (4, 1, pytest.approx(4 / 5))
    assert found.ttft_s is not None
    assert found.ttft_s.p50 == pytest.approx(0.1)
    assert stats.kinds["chat"].slo_attainment_frac == 0
    assert stats.slo_attainment_frac == pytest.approx(4 / 13)
    assert stats.ttft_s is not None
    assert stats.ttft_s.n == 12


def test_a_growing_queue_is_said() -> None:
    late = [request(sched=t, start=t, chunks=[(t * 1.4 + 20, 1), (t * 1.4 + 40, 1)]) for t in range(0, 30_000, 50)]
    stats = level_stats(load_run(late, window=(0, 30_000), level="r=20", rate_rps=20.0, steady=False), {})
    assert stats.stable is False
    assert stats.valid
    assert "before the speed was steady" in stats.reasons[0]
    assert "the queue grew during the window" in stats.reasons[1]
    assert (stats.rate_rps, stats.arrivals is None) == (20, False)


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
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (5, 2)


@pytest.mark.slow
def test_the_whole_run_has_the_keys_of_vllms_own_program() -> None:
    """Calls the arithmetic of `vllm bench serve` itself, where it is installed."""
    serve = pytest.importorskip("vllm.benchmarks.serve")
    functions = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
    records = [
        request(start=i * 37, chunks=[(i * 37 + 20 + i % 7, 1), (i * 37 + 300, 3), (i * 37 + 900 + i, 2)])
        for i in range(50)
    ]
    outputs = [
        functions.RequestFuncOutput(
            success=True,
            latency=(r.chunks[-1][0] - r.t_start_ns) / 1e9,
            ttft=(r.chunks[0][0] - r.t_start_ns) / 1e9,
            itl=[(b[0] - a[0]) / 1e9 for a, b in zip(r.chunks, r.chunks[1:], strict=False)],
            output_tokens=r.output_tokens,
            prompt_len=r.prompt_tokens,
            start_time=r.t_start_ns / 1e9,
        )
        for r in records
    ]
    ours = whole_run(load_run(records), {"ttft_p99": 0.022, "tpot_p99": 0.18, "e2e_p99": 0.92})
    theirs, _ = serve.calculate_metrics(
        [], outputs, ours["duration"], None, [50, 90, 95, 99], {"ttft": 22, "tpot": 180, "e2el": 920}
    )
    assert 0 < ours["request_goodput"] < ours["request_throughput"]
    for key, value in ours.items():
        if key[0] == "p" and key[1].isdigit():
            point, _, name = key.removesuffix("_ms").partition("_")
            assert value == pytest.approx(dict(getattr(theirs, f"percentiles_{name}_ms"))[int(point[1:])]), key
        elif key != "duration":
            own = {"total_input_tokens": "total_input", "total_output_tokens": "total_output"}.get(key, key)
            assert value == pytest.approx(getattr(theirs, own)), key


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


@given(
    st.lists(
        st.builds(
            request,
            start=st.floats(0, 900),
            chunks=st.lists(st.tuples(st.floats(900, 1200), st.integers(1, 4)), max_size=4).map(sorted),
            status=st.sampled_from(["truncated", "connect", "cancelled"]),
            counted=st.booleans(),
            kind=st.sampled_from([None, "chat"]),
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
