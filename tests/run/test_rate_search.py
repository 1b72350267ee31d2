"""The search for the highest rate, on answers without and with noise, and on simulated queues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sweep.model import LoadRun, RequestRecord
from sweep.run.rate_search import Bracket, RateSearch, met, settled, start_rps
from sweep.run.sequential import SequentialJudge
from tests.run.queues import SLO, Queue

from .studies import dist, level

SERVERS = {
    "few slots": Queue(slots=16, service_s=0.8),
    "many slots": Queue(slots=64, service_s=1.5),
}


def drive(search: RateSearch, passes: dict[float, bool] | None = None, limit: float = 0.0) -> list[float]:
    tried = []
    while (rate := search.next()) is not None:
        tried.append(rate)
        search.tell(rate, passed=passes.pop(rate) if passes is not None else rate <= limit)
    return tried


@given(start=st.floats(0.01, 1e4), factor=st.floats(1 / 6, 6))
def test_without_noise_the_limit_lies_in_the_bracket(start: float, factor: float) -> None:
    limit = start * factor
    search = RateSearch(start)
    tried = drive(search, limit=limit)
    low, high = search.bracket.low_rps, search.bracket.high_rps
    assert low is not None
    assert high is not None
    assert low <= limit < high
    assert high / low <= 1.1
    assert {low, high} <= set(tried)
    assert len(tried) <= 9


@given(answers=st.lists(st.booleans(), min_size=12, max_size=12), start=st.floats(0.01, 1e4))
def test_whatever_is_answered_it_ends_and_claims_nothing_that_was_not_tried(answers: list[bool], start: float) -> None:
    search = RateSearch(start)
    tried: dict[float, bool] = {}
    while (rate := search.next()) is not None:
        assert rate not in tried
        tried[rate] = answers[len(tried)]
        search.tell(rate, passed=tried[rate])
    assert len(tried) <= 10
    low, high = search.bracket.low_rps, search.bracket.high_rps
    if low is not None:
        assert low in tried
        below = [passed for rate, passed in tried.items() if rate <= low]
        assert sum(below) > len(below) / 2
        assert high is None or low < high
    if high is None:
        assert low == max(tried)


def test_a_contradiction_is_settled_by_a_try_in_between() -> None:
    search = RateSearch(8)
    for rate, passed in ((8.0, True), (16.0, False), (11.3, True), (5.0, False)):
        search.tell(rate, passed=passed)
    assert search.bracket.low_rps == 11.3  # two of three passed
    search = RateSearch(8)
    search.tell(4, passed=True)
    search.tell(6, passed=False)
    search.tell(8, passed=True)
    search.tell(16, passed=False)
    between = search.next()
    assert between == 6.93
    search.tell(between, passed=True)
    assert search.bracket == Bracket(8, 16)


def test_nothing_is_claimed_above_the_highest_rate_tried() -> None:
    search = RateSearch(1)
    assert drive(search, limit=1e9)[-1] == 512
    assert search.bracket == Bracket(512, None)
    nothing = RateSearch(1)
    drive(nothing, limit=0)
    assert nothing.bracket.low_rps is None


@pytest.mark.parametrize("server", SERVERS.values(), ids=list(SERVERS))
def test_the_highest_rate_of_a_queue_is_found(server: Queue) -> None:
    truth = server.highest_rps()
    found, seconds = [], []
    for seed in range(60):
        search, spent, tries = RateSearch(0.7 * server.capacity_rps), 0.0, 0
        while (rate := search.next()) is not None:
            verdict, took = server.try_rate(rate, SequentialJudge(SLO), seed=100 * seed + tries)
            search.tell(rate, passed=verdict.endswith("pass"))
            spent, tries = spent + took, tries + 1
        found.append((search.bracket.low_rps or 0.0) / truth)
        seconds.append(spent)
    # The bracket's own width, and what 60 s of requests can tell of a 99th percentile: about as much again.
    near = [1 / 1.1**2 <= ratio <= 1.1**2 for ratio in found]
    assert sum(near) >= 0.95 * len(near), sorted(found)
    assert sum(seconds) / len(seconds) < 200  # five tries of 60 s would be 300


def test_rates_that_were_met_by_chance_and_doubts_are_marked() -> None:
    slo = {"ttft_p50": 0.5}
    levels = {rate: level(100, ttft_s, name=f"r={rate:g}") for rate, ttft_s in ((8.0, 0.1), (4.0, 0.9), (2.0, 0.1))}
    first, second, third = settled(levels, Bracket(2.0, 4.0), slo)
    assert [stats.level for stats in (first, second, third)] == ["r=2", "r=4", "r=8"]
    assert (first.valid, second.valid, third.valid) == (True, True, False)
    assert "by chance" in third.reasons[0]
    assert any("between 2 and 4 req/s" in reason for reason in first.reasons)
    assert any("too short to be sure" in reason for reason in first.reasons)


def test_the_start_follows_from_the_tokens_of_a_saturated_server() -> None:
    run = LoadRun("c=64", (request(40), request(60)), 0, 0, 1, 1, steady=True, stamp_source="kernel", cpu_s=0)
    assert start_rps(level(1000), run) == pytest.approx(0.7 * 1000 / 50)
    assert start_rps(replace(level(1000), output_tps=None), run) > 0


def request(tokens: int) -> RequestRecord:
    return RequestRecord("r", True, None, 0, 0, 0, 1, ((1, tokens),), 10, None, tokens, tokens, "ok")


def test_a_certain_verdict_decides_and_else_what_was_measured() -> None:
    slo = {"ttft_p50": 0.5}
    good, bad = level(100, 0.1), level(100, 0.9)
    assert met(good, slo)
    assert not met(bad, slo)
    assert not met(replace(good, verdict="fail"), slo)
    assert not met(replace(good, stable=False), slo)
    assert not met(replace(good, valid=False), slo)
    assert not met(replace(good, ttft_s=None), slo)
    assert met(replace(good, verdict="pass", ttft_s=dist(0.49)), slo)
