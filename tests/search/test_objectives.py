"""Reading an objective, and what a trial is worth by it."""

import dataclasses

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from sweep.failure import Failure
from sweep.model import Dist, KindStats, LevelStats, Measured, Verdict
from sweep.search.objectives import METRICS, Objective
from sweep.slo import SLO_NAMES


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


def _kind(completed, failed, ttft=0.1):
    dist = _dist(ttft, completed) if completed else None
    return KindStats(completed, failed, dist, None, dist, dist, dist, None)


def _measured(*levels):
    return Measured("complete", levels)


def _objective(**settings):
    return Objective.model_validate(settings)


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
    objective = _objective(**{metric.direction: name}, slo={"ttft_p99": "9s"})
    verdict = objective.judge(_measured(_level("r=1", rate_rps=1.0)), None, gpus=2)
    assert verdict.value is not None
    assert verdict.eligible
    assert objective.direction == metric.direction
    assert objective.describe(verdict.value).endswith(objective.unit)
    assert objective.label == metric.label


def test_what_counts_requests_within_limits_needs_some():
    for name in ("goodput_rps", "rate_rps"):
        alone = _objective(maximize=name)
        assert "add slo" in alone.problem()
        assert alone.with_limits({"chat.ttft_p99": 0.5}).problem() is None
    assert _objective(maximize="output_tps").problem() is None


def test_limits_of_classes_are_judged_by_the_figures_of_the_class():
    objective = _objective(maximize="output_tps", slo={"e2e_p99": "9s"}).with_limits(
        {"chat.ttft_p99": 0.1, "code.ttft_p99": 0.1, "gone.ttft_p99": 0.1}
    )

    def kind(ttft, completed, failed=0):
        return KindStats(completed, failed, _dist(ttft), None, None, None, None, None)

    level = _level("c=4", kinds={"chat": kind(0.02, 50), "code": kind(0.2, 700, failed=70)})
    verdict = objective.judge(_measured(level), None, 1)
    assert objective.ratios(level) == pytest.approx({"e2e_p99": 2.2 / 9, "chat.ttft_p99": 0.4, "code.ttft_p99": 4.0})
    assert verdict.miss == pytest.approx({"code.ttft_p99": 4.0})
    assert verdict.note == "chat.ttft_p99 rests on 50 requests, 662 would make it sure; gone.ttft_p99 was not measured"


def _rate(rate_rps, ttft=0.1, **changes):
    return _level(f"r={rate_rps:g}", ttft, rate_rps=rate_rps, **changes)


def test_the_highest_rate_under_the_slos():
    objective = _objective(maximize="rate_rps", slo={"ttft_p99": "1s"})
    levels = _measured(_rate(4.0), _rate(8.0), _rate(6.5), _rate(10.0, ttft=0.6), _rate(9.0, stable=False))
    verdict = objective.judge(levels, None, 1)
    assert (verdict.value, verdict.level.level, verdict.slo_met) == (8.0, "r=8", True)
    assert objective.words == "maximize sustained request rate with TTFT p99 <= 1 s"
    grew = objective.judge(_measured(_rate(4.0, stable=False)), None, 1)
    assert (grew.value, grew.slo_met, grew.miss, grew.eligible) == (4.0, False, {}, False)
    assert _objective(maximize="output_tps", slo={"ttft_p99": "1s"}).judge(levels, None, 1).level.level == "r=9"


def test_what_a_judge_was_sure_of_counts():
    objective = _objective(maximize="rate_rps", slo={"ttft_p99": "1s"})
    levels = _measured(_rate(4.0, 0.6, verdict="pass"), _rate(5.0, verdict="fail"), _rate(6.0, verdict="unstable"))
    verdict = objective.judge(levels, None, 1)
    assert (verdict.value, verdict.slo_met, verdict.miss) == (4.0, True, {})


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_level_that_is_not_valid_never_counts(good, bad):
    for name in ("output_tps", "rate_rps", "total_tps"):
        objective = _objective(maximize=name, slo={"ttft_p99": "1s"})
        levels = _measured(_rate(1.0, tps=good), _rate(2.0, tps=bad, valid=False, reasons=("the client was slow",)))
        verdict = objective.judge(levels, None, 1)
        assert verdict.level.level == "r=1"
        assert "the client was slow" in verdict.note
        assert objective.judge(_measured(levels.levels[1]), None, 1).value is None


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


@pytest.mark.parametrize(
    ("kinds", "met"),
    [
        ({"rag": _kind(40, 0)}, True),
        ({"rag": _kind(40, 0, ttft=2.0)}, False),
        ({"rag": _kind(0, 14)}, False),  # whatever failed has missed
        ({}, False),  # nobody knows
        ({"rag": _kind(0, 0)}, False),
    ],
)
@pytest.mark.parametrize("goal", ["output_tps", "rate_rps"])
def test_a_class_that_failed_or_was_never_served_meets_no_limit(kinds, met, goal):
    level = _level("r=3", kinds=kinds, rate_rps=3.0, stable=True)
    verdict = _objective(maximize=goal).with_limits({"rag.ttft_p99": 1.0}).judge(_measured(level), None, 1)
    assert verdict.slo_met is met
    assert verdict.eligible is met


def test_answers_of_one_token_meet_any_limit_on_tpot():
    level = _level("c=4", tpot_s=None)
    assert _objective(maximize="output_tps", slo={"tpot_p99": "1ms"}).judge(_measured(level), None, 1).slo_met
