"""Reading an objective, and what a trial is worth by it."""

import dataclasses

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from sweep.model import Dist, Failure, LevelStats, Measured, Verdict
from sweep.search.objectives import METRICS, SLO_NAMES, Objective, read_slo


def _dist(seconds, n=1000):
    return Dist(mean=seconds, p50=seconds, p90=1.5 * seconds, p95=1.7 * seconds, p99=2 * seconds, n=n)


def _level(name, ttft=0.1, tpot=0.01, tps=100.0, n=1000, **changes):
    level = LevelStats(
        level=name,
        completed=n,
        failed=0,
        errors={},
        window_s=30.0,
        warmup_s=5.0,
        warmup_requests=8,
        steady=True,
        ttft_s=_dist(ttft, n),
        ttft_sched_s=None,
        tpot_s=_dist(tpot, n),
        itl_s=_dist(tpot, n),
        e2e_s=_dist(ttft + 100 * tpot, n),
        output_tps=tps,
        total_tps=3 * tps,
        request_rps=tps / 100,
        goodput_rps=tps / 200,
        slo_attainment_frac=None,
        prompt_tokens=1000,
        output_tokens=1000,
        prefix_offered_frac=0.0,
    )
    return dataclasses.replace(level, **changes)


def _measured(*levels):
    return Measured("complete", levels)


def _objective(**settings):
    return Objective.model_validate(settings)


def test_limits_are_read_into_seconds():
    assert read_slo({"ttft_p99": "1s", "tpot_mean": "50ms", "e2e_p95": " 1.5 s ", "itl_p90": ".5ms"}) == {
        "ttft_p99": 1.0,
        "tpot_mean": 0.05,
        "e2e_p95": 1.5,
        "itl_p90": 0.0005,
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"ttft_p99": 200}, "200 has no unit; write 200ms or 200s"),
        ({"ttft_p99": "0.2"}, "has no unit"),
        ({"ttft_p99": "-1s"}, "no duration"),
        ({"ttft_p99": "0ms"}, "above 0"),
        ({"ttft_p99": "1e999s"}, "above 0"),
        ({"ttft_p99": True}, "no duration"),
        ({"ttft_p99": None}, "no duration"),
        ({"ttft_p101": "1s"}, "unknown latency 'ttft_p101'.*did you mean 'ttft_p"),
        ({"tftt_p99": "1s"}, "did you mean 'ttft_p99'"),
        ({"output_tps": "1s"}, "output_tps is a rate"),
        ({7: "1s"}, "unknown latency 7"),
    ],
)
def test_limits_that_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        read_slo(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"maximize": "output_tpz"}, "unknown metric 'output_tpz'.*did you mean 'output_tps'.*request_rps"),
        ({"maximize": "ttft_p99"}, "to be minimized: write {minimize: ttft_p99}"),
        ({"minimize": "output_tps"}, "to be maximized: write {maximize: output_tps}"),
        ({"minimize": "ttft"}, "unknown metric 'ttft'.*such as ttft_p99"),
        ({"maximise": "output_tps"}, "one of maximize, minimize or balance is missing"),
        ({}, "is missing"),
        ({"slo": {"ttft_p99": "1s"}}, "is missing"),
        ("output_tps", "write {maximize: output_tps}"),
        ([{"maximize": "output_tps"}], "not available yet"),
        ({"pareto": ["output_tps", "ttft_p99"]}, "not available yet"),
        ({"maximize": "output_tps", "minimize": "ttft_p99"}, "not available yet"),
        ({"maximize": "output_tps", "direction": "min"}, "Extra inputs"),
        ({"maximize": "goodput_rps"}, "add slo"),
        ({"balance": {"ttft": 0, "tpot": 0}}, "all weights are 0"),
        ({"balance": {"ttft": -1, "tpot": 2}}, "the weight of ttft is -1"),
        ({"balance": {"tftt": 1}}, "unknown part 'tftt'.*did you mean 'ttft'"),
        ({"balance": {"ttft": float("nan")}}, "finite"),
        ({"balance": {}}, "is missing"),
    ],
)
def test_objectives_that_are_refused(raw, message):
    with pytest.raises(ValidationError, match=message):
        Objective.model_validate(raw)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_an_objective_with_a_unit_and_a_value(name):
    metric = METRICS[name]
    slo = {"slo": {"ttft_p99": "9s"}} if name == "goodput_rps" else {}
    objective = _objective(**{metric.direction: name}, **slo)
    verdict = objective.judge(_measured(_level("c=1")), None, gpus=2)
    assert verdict.value is not None
    assert verdict.eligible
    assert objective.direction == metric.direction
    assert objective.describe(verdict.value).endswith(objective.unit)
    assert objective.label == metric.label


def test_values_and_words():
    measured = _measured(_level("c=8", ttft=0.25, tps=1842.0))
    assert _objective(maximize="output_tps_per_gpu").judge(measured, None, 4).value == 460.5
    latency = _objective(minimize="ttft_p99", slo={"tpot_p99": "50ms"})
    assert latency.judge(measured, None, 1).value == pytest.approx(500)
    assert latency.words == "minimize TTFT p99 with TPOT p99 <= 50 ms"
    assert _objective(maximize="output_tps").describe(1842.0) == "1,842 tok/s"


def test_without_slos_the_last_level_counts():
    verdict = _objective(maximize="output_tps").judge(_measured(_level("c=64", tps=5), _level("c=8", tps=3)), None, 1)
    assert (verdict.level.level, verdict.value, verdict.slo_met) == ("c=8", 3, None)


def test_the_highest_level_that_meets_every_slo_counts():
    objective = _objective(maximize="output_tps", slo={"ttft_p99": "1s", "tpot_p99": "50ms"})
    levels = _measured(
        _level("c=256", ttft=0.6, tps=900),
        _level("c=64", ttft=0.1, tps=300),
        _level("c=128", ttft=0.4, tps=600),
        _level("c=512", ttft=0.1, tps=999, valid=False, reasons=("the client was the bottleneck",)),
    )
    verdict = objective.judge(levels, None, 1)
    assert (verdict.level.level, verdict.value, verdict.slo_met, verdict.miss) == ("c=128", 600, True, {})
    assert "c=512 is not valid (the client was the bottleneck)" in verdict.note


def test_the_nearest_miss_is_named_when_no_level_meets_them():
    objective = _objective(maximize="output_tps", slo={"ttft_p99": "100ms", "tpot_p99": "10ms"})
    verdict = objective.judge(
        _measured(_level("c=1", ttft=0.05, tpot=0.02, tps=1), _level("c=2", ttft=0.06, tpot=0.01, tps=2)), None, 1
    )
    assert verdict.level.level == "c=2"
    assert verdict.slo_met is False
    assert verdict.miss == pytest.approx({"ttft_p99": 1.2, "tpot_p99": 2.0})
    assert verdict.value == 2
    assert not verdict.eligible


def test_an_open_loop_is_judged_from_the_schedule():
    objective = _objective(minimize="ttft_p50", slo={"ttft_p99": "1s", "e2e_p50": "2s"})
    level = _level("r=8", ttft=0.1, ttft_sched_s=_dist(0.7), e2e_sched_s=_dist(3.0))
    verdict = objective.judge(_measured(level), None, 1)
    assert verdict.value == pytest.approx(700)
    assert verdict.miss == pytest.approx({"ttft_p99": 1.4, "e2e_p50": 1.5})


def test_too_few_requests_are_noted_and_judged_all_the_same():
    objective = _objective(maximize="output_tps", slo={"ttft_p99": "1s", "ttft_p50": "1s"})
    verdict = objective.judge(_measured(_level("c=4", n=128)), None, 1)
    assert verdict.slo_met
    assert verdict.note == "ttft_p99 rests on 128 requests, 662 would make it sure"
    assert objective.judge(_measured(_level("c=4", n=662)), None, 1).note is None


def test_answers_of_one_token_meet_any_limit_on_the_time_between_tokens():
    objective = _objective(maximize="request_rps", slo={"tpot_p99": "1ms"})
    verdict = objective.judge(_measured(_level("c=4", tpot_s=None)), None, 1)
    assert verdict.slo_met
    assert verdict.note == "tpot_p99 was not measured"


def test_a_server_that_refuses_requests_does_not_meet_its_slos():
    objective = _objective(maximize="output_tps", slo={"ttft_p99": "1s", "ttft_p50": "1s"})
    verdict = objective.judge(_measured(_level("c=4", n=900, failed=100)), None, 1)
    assert verdict.miss == {"ttft_p99": 1.1}
    assert "100 of 1000 requests failed" in verdict.note


@pytest.mark.parametrize("state", ["infeasible", "skipped", "pruned", "invalid", "failed", "interrupted"])
def test_only_a_complete_trial_is_worth_anything(state):
    measured = Measured(state, (_level("c=4"),), Failure("other", "retry", "", ""))
    assert _objective(maximize="output_tps").judge(measured, None, 1) == Verdict(None, None, None)


def test_a_trial_without_a_valid_level_says_why():
    objective = _objective(maximize="output_tps", slo={"ttft_p99": "1s"})
    verdict = objective.judge(_measured(_level("c=4", valid=False, reasons=("client slow",))), None, 1)
    assert verdict.note == "no level could be measured; client slow"
    assert not verdict.eligible
    assert objective.judge(_measured(), None, 1).value is None
    assert objective.judge(_measured(_level("c=4", n=0, ttft_s=None)), None, 1).value is None


def test_a_balance_is_the_weighted_geometric_mean_of_the_gains():
    objective = _objective(balance={"ttft": 1, "tpot": 1, "throughput": 2})
    base = _measured(_level("c=8", ttft=0.2, tpot=0.02, tps=100))
    assert objective.judge(base, base, 1).value == pytest.approx(1.0)
    better = _measured(_level("c=8", ttft=0.1, tpot=0.01, tps=200))
    assert objective.judge(better, base, 1).value == pytest.approx(2.0)
    mixed = _measured(_level("c=8", ttft=0.8, tpot=0.02, tps=200))
    assert objective.judge(mixed, base, 1).value == pytest.approx((0.25 * 1 * 2**2) ** 0.25)
    assert objective.unit == "x"
    alone = objective.judge(better, None, 1)
    assert alone.value is None
    assert alone.note == "no baseline to compare with"


def test_a_part_without_weight_need_not_be_measured():
    objective = _objective(balance={"ttft": 1, "tpot": 0})
    base = _measured(_level("c=8", ttft=0.2, tpot_s=None))
    assert objective.judge(_measured(_level("c=8", ttft=0.1)), base, 1).value == pytest.approx(2.0)


_SLOS = {"ttft_p99": "200ms", "tpot_p50": "10ms"}
_loads = st.lists(
    st.tuples(st.integers(1, 999), st.floats(0.01, 1), st.floats(0.001, 0.1), st.booleans()),
    max_size=5,
    unique_by=lambda load: load[0],
)


@given(_loads)
def test_the_chosen_level_is_the_highest_valid_one_that_meets_them(loads):
    objective = _objective(maximize="output_tps", slo=_SLOS)
    levels = [_level(f"c={load}", ttft, tpot, valid=valid) for load, ttft, tpot, valid in loads]
    verdict = objective.judge(_measured(*levels), None, 1)
    valid = [load for load in loads if load[3]]
    meeting = [load for load, ttft, tpot, _ in valid if 2 * ttft <= 0.2 and tpot <= 0.01]
    if meeting:
        assert verdict.level.level == f"c={max(meeting)}"
        assert verdict.slo_met
        assert not verdict.miss
    elif valid:
        nearest = min(max(2 * ttft / 0.2, tpot / 0.01) for _, ttft, tpot, _ in valid)
        assert max(verdict.miss.values()) == pytest.approx(nearest)
        assert verdict.slo_met is False
    else:
        assert verdict.value is None


_verdicts = st.builds(
    lambda value, misses: Verdict(None, value, None if misses is None else not misses, misses or {}),
    st.none() | st.integers(1, 4).map(float),
    st.none()
    | st.dictionaries(st.sampled_from(["ttft_p99", "tpot_p99"]), st.sampled_from([1.5, 2.0, 3.0]), max_size=2),
)


@given(_verdicts, _verdicts, _verdicts, st.sampled_from([{"maximize": "output_tps"}, {"minimize": "ttft_p99"}]))
def test_better_is_a_strict_weak_order(a, b, c, raw):
    better = Objective.model_validate(raw).better
    assert not better(a, a)
    if better(a, b):
        assert not better(b, a)
    if better(a, b) and better(b, c):
        assert better(a, c)
    if not (better(a, b) or better(b, a) or better(b, c) or better(c, b)):
        assert not better(a, c)
    if a.eligible and not b.eligible:
        assert better(a, b)


def test_of_two_misses_the_nearer_one_is_better():
    objective = _objective(maximize="output_tps", slo=_SLOS)
    near, far = Verdict(None, 1.0, False, {"ttft_p99": 1.1}), Verdict(None, 9.0, False, {"ttft_p99": 1.2})
    assert objective.better(near, far)
    assert objective.better(Verdict(None, 2.0, True), Verdict(None, 1.0, True))
    assert _objective(minimize="ttft_p99").better(Verdict(None, 1.0, None), Verdict(None, 2.0, None))


@given(st.dictionaries(st.sampled_from(SLO_NAMES), st.floats(1e-6, 1e4)))
def test_limits_survive_json(limits):
    objective = _objective(maximize="output_tps", slo={name: f"{limit!r}s" for name, limit in limits.items()})
    assert objective.slo == limits
    assert Objective.model_validate_json(objective.model_dump_json()) == objective
