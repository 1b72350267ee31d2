"""The client's figures against those of a server that knows when it did what."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sweep.load.client import Target, Warmup, run_level
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.measure.goodput import cohort
from sweep.measure.latency import e2e_s, tpot_s, ttft_s
from sweep.model import LoadRun, RequestRecord
from tests.refserver.running import RefServer, ref_server

pytestmark = pytest.mark.timeout(60)

TOKENS = 16


def drive(url: str, processes: int = 1, **fields: object) -> LoadRun:
    load = LoadSection.model_validate({"prompt": {"tokens": 8}, "output": {"tokens": TOKENS}} | fields)
    prompts = PromptSource(Plan(load, 3), 2, text=load.endpoint == "chat")
    run = run_level(
        Target(url, "m", endpoint=load.endpoint),
        load.levels()[0],
        load,
        prompts=prompts,
        warmup=Warmup(0.1, 0.1, lambda _bins: True),
        processes=processes,
    )
    return asyncio.run(run)


@pytest.fixture(scope="module", params=["burst", "spread"])
def server(request: pytest.FixtureRequest) -> Iterator[RefServer]:
    options = ("--mode", request.param, "--ttft", "0.03", "--ttft-sigma", "0.3", "--itl", "0.01")
    with ref_server(*options) as running:
        yield running


def joined(run: LoadRun, truth: Mapping[str, Any]) -> list[tuple[RequestRecord, Mapping[str, Any]]]:
    """Return the counted requests, each with what the server knows of it."""
    told = {entry["x_request_id"]: entry for entry in truth["requests"]}
    return [(record, told[record.request_id]) for record in run.records if record.counted]


def true_s(entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return TTFT, TPOT and E2E, in seconds."""
    (first, head), last = entry["writes"][0], entry["writes"][-1][0]
    return (first - entry["recv_ns"]) / 1e9, (last - first) / 1e9 / (TOKENS - head), (last - entry["recv_ns"]) / 1e9


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("scenario", ["normal", "empty_text", "four_a_chunk"])
def test_latencies_and_tokens_are_those_of_the_server(server: RefServer, endpoint: str, scenario: str) -> None:
    server.reset()
    server.play([(scenario, 0)] * 1000)
    run = drive(server.url, endpoint=endpoint, concurrency=20, requests=40)
    pairs = joined(run, server.truth())
    assert len(pairs) == 40
    for record, entry in pairs:
        assert record.status == "ok"
        assert [count for _, count in record.chunks] == [count for _, count in entry["writes"]]
    true = [np.median(column) for column in zip(*(true_s(entry) for _, entry in pairs), strict=True)]
    for measure, real in zip((ttft_s, tpot_s, e2e_s), true, strict=True):
        found = np.median([measure(record) for record, _ in pairs])
        assert abs(found - real) < max(0.05 * real, 0.002), measure.__name__


def test_a_freeze_costs_the_requests_that_were_due_in_it() -> None:
    """Nothing is written for 2 s at 20 arrivals a second: whoever came in all but the last half second waits longer."""
    limit_s, rate_rps = 0.5, 20
    with ref_server("--ttft", "0.01", "--itl", "0.002", "--freeze", "2,2") as server:
        run = drive(server.url, rate=rate_rps, arrivals="constant", seconds=6, output={"tokens": 4})
    found = cohort(run.records, {"ttft_p99": limit_s})
    assert found.judged == 6 * rate_rps
    assert abs(len(found.missed) - rate_rps * (2 - limit_s)) <= 2
    worst = max((r.chunks[0][0] - r.t_sched_ns) / 1e9 for r in run.records if r.t_sched_ns is not None and r.counted)
    assert worst == pytest.approx(2, abs=0.15)


RATE_RPS, SECONDS, BIN_S = 200, 4, 0.1


def arrivals(server: RefServer, processes: int) -> tuple[LoadRun, list[int]]:
    """Return the run of a Poisson load, and when the server got the requests of the window."""
    server.reset()
    run = drive(server.url, processes, rate=RATE_RPS, seconds=SECONDS, output={"tokens": 1})
    return run, sorted(entry["recv_ns"] for record, entry in joined(run, server.truth()))


def dispersion(stamps: Sequence[int], start_ns: int) -> float:
    """Return variance / mean of the counts in bins."""
    bins = round(SECONDS / BIN_S)
    counts = np.bincount([min(int((at - start_ns) / 1e9 / BIN_S), bins - 1) for at in stamps], minlength=bins)
    return float(counts.var(ddof=1) / counts.mean())


def test_arrivals_are_poisson_for_the_server_however_many_processes_send_them() -> None:
    offsets = []
    with ref_server("--ttft", "0.002") as server:
        for processes in (1, 2, 4):
            run, stamps = arrivals(server, processes)
            assert run.processes == processes
            # The standard error of the index of dispersion of a Poisson process is sqrt(2 / (bins - 1)).
            assert abs(dispersion(stamps, run.window_start_ns) - 1) < 3 * (2 / (SECONDS / BIN_S - 1)) ** 0.5
            assert abs(len(stamps) - RATE_RPS * SECONDS) < 3 * (RATE_RPS * SECONDS) ** 0.5
            gaps = np.array([b - a for a, b in pairwise(stamps)]) / 1e9
            assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.15)
            due = sorted(r.t_sched_ns - run.window_start_ns for r in run.records if r.counted and r.t_sched_ns)
            offsets.append(due)
            late_ms = [(at - run.window_start_ns - planned) / 1e6 for at, planned in zip(stamps, due, strict=True)]
            assert np.median(late_ms) < 5
    assert offsets[0] == offsets[1] == offsets[2]  # one schedule, dealt out
