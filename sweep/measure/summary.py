"""Figures of a level, from the records of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sweep.measure.latency import dist, e2e_s, e2e_sched_s, itl_s, tpot_s, ttft_s, ttft_sched_s
from sweep.model import ClientStats, LevelStats, LoadRun, RequestRecord, ServerStats

_NS = 1e9
_MOST_FAILED_FRAC = 0.05
_BUSIEST_CLIENT_FRAC = 0.9  # of one core; a client that is busier cannot tell its own pace from the server's
_LEAST_FINISHED_FRAC = 0.9
_COUNT_TOLERANCE_FRAC = 0.05
_ENDINGS = {"stalled": "no stream brought a byte any more", "failing": "request after request failed"}
_SCRAPE_EDGE_S = 2.0  # the server's figures are of a window whose ends lie up to a second away


def level_stats(run: LoadRun, slo: Mapping[str, float], server: ServerStats | None = None) -> LevelStats:
    """Summarise a run. slo: such as ttft_p99 -> seconds; for goodput the same number is the limit of each request.

    Rates are of the steady window, by the time at which tokens arrived. Latencies are of the counted requests that
    succeeded; what failed is a miss of every SLO.
    """
    counted = [r for r in run.records if r.counted and r.status != "cancelled"]
    good = [r for r in counted if r.status == "ok"]
    failed = [r for r in counted if r.status != "ok"]
    window_s = (run.window_end_ns - run.window_start_ns) / _NS
    output_tokens, prompt_tokens = _window_tokens(run)
    ended = [
        r for r in run.records if r.status != "cancelled" and run.window_start_ns <= r.t_end_ns < run.window_end_ns
    ]
    succeeded = sum(r.status == "ok" for r in ended)
    attainment = sum(meets(r, slo) for r in counted) / len(counted) if slo and counted else None
    # Where nothing was counted, the warm-up's failures are all there is to tell.
    errors = Counter(r.status for r in failed or (r for r in run.records if r.status not in {"ok", "cancelled"}))
    reasons = [*_faults(run, counted, len(failed), errors), *_mismatch(output_tokens, window_s, server)]

    def rate(count: float) -> float | None:
        return count / window_s if window_s > 0 and good else None

    return LevelStats(
        level=run.level,
        completed=len(good),
        failed=len(failed),
        errors=dict(errors),
        window_s=window_s,
        warmup_s=(run.window_start_ns - run.start_ns) / _NS,
        warmup_requests=sum(not r.counted and r.t_start_ns < run.window_start_ns for r in run.records),
        steady=run.steady,
        ttft_s=dist(_values(good, ttft_s)),
        ttft_sched_s=dist(_values(good, ttft_sched_s)),
        tpot_s=dist(_values(good, tpot_s)),
        itl_s=dist([gap for r in good for gap in itl_s(r)]),
        e2e_s=dist(_values(good, e2e_s)),
        e2e_sched_s=dist(_values(good, e2e_sched_s)),
        output_tps=rate(output_tokens),
        total_tps=rate(output_tokens + prompt_tokens),
        request_rps=rate(succeeded),
        goodput_rps=None if attainment is None else rate(sum(meets(r, slo) for r in ended)),
        slo_attainment_frac=attainment,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        prefix_offered_frac=_prefix_offered(run),
        client=_client_stats(run),
        server=server,
        valid=not reasons,
        reasons=(*reasons, *_cautions(run)),
    )


def _values(records: Iterable[RequestRecord], of: Callable[[RequestRecord], float | None]) -> list[float]:
    return [value for record in records if (value := of(record)) is not None]


def _window_tokens(run: LoadRun) -> tuple[int, int]:
    """Count output tokens that arrived in the window, and prompt tokens of the requests whose first one did.

    Requests that are cut off by the run's end count with what arrived; a failed stream is of no use to anybody.
    """
    start, end = run.window_start_ns, run.window_end_ns
    output = prompt = 0
    for record in run.records:
        if record.status in {"ok", "cancelled"} and record.chunks:
            output += sum(count for at, count in record.chunks if start <= at < end)
            prompt += record.prompt_tokens if start <= record.chunks[0][0] < end else 0
    return output, prompt


def meets(record: RequestRecord, slo: Mapping[str, float]) -> bool:
    """Tell whether a request succeeded within every limit; in an open loop TTFT and E2E count from the schedule.

    A request of a single event has no time per output token: such a limit cannot be missed.
    """
    if record.status != "ok":
        return False
    for name, limit_s in slo.items():
        value = _per_request(record, name)
        if value is not None and value > limit_s:
            return False
    return True


def _per_request(record: RequestRecord, name: str) -> float | None:
    metric, _, stat = name.rpartition("_")
    scheduled = record.t_sched_ns is not None
    if metric == "ttft":
        return ttft_sched_s(record) if scheduled else ttft_s(record)
    if metric == "e2e":
        return e2e_sched_s(record) if scheduled else e2e_s(record)
    if metric == "tpot":
        return tpot_s(record)
    gaps = dist(itl_s(record))
    return None if gaps is None else float(getattr(gaps, stat))


def _prefix_offered(run: LoadRun) -> float | None:
    """Share of the counted prompt tokens whose prefix an earlier request of the run had already brought."""
    seen: set[int] = set()
    offered = total = 0
    for record in sorted(run.records, key=lambda r: r.t_start_ns):
        if record.counted:
            total += record.prompt_tokens
            offered += run.prefix_tokens if record.prefix_group in seen else 0
        if record.prefix_group is not None:
            seen.add(record.prefix_group)
    return offered / total if total else None


def _client_stats(run: LoadRun) -> ClientStats:
    events = sum(len(record.chunks) for record in run.records)
    lags = [
        (r.t_send_ns - (r.t_start_ns if r.t_sched_ns is None else r.t_sched_ns)) / _NS
        for r in run.records
        if r.t_send_ns is not None and r.counted
    ]
    lag = dist(lags)
    return ClientStats(
        cpu_us_per_event=1e6 * run.cpu_s / events if events else None,
        send_lag_p99_s=lag.p99 if lag else None,
        stamp_source=run.stamp_source,
    )


def _faults(run: LoadRun, counted: Sequence[RequestRecord], failed: int, errors: Mapping[str, int]) -> Iterable[str]:
    """Yield what makes the figures worthless."""
    words = ", ".join(f"{status} {count}" for status, count in errors.items())
    if run.ended_early:
        yield f"the load ended early: {_ENDINGS[run.ended_early]}"
    if any(record.status == "ok" and record.t_send_ns is None for record in counted):
        yield "the time at which requests were sent could not be had, so latencies are not known"
    if not counted:
        yield f"no request was counted{f'; before that: {words}' if words else ''}"
    elif failed > _MOST_FAILED_FRAC * len(counted):
        yield f"{failed} of {len(counted)} requests failed ({words}), more than {_MOST_FAILED_FRAC:.0%}"


def _mismatch(output_tokens: int, window_s: float, server: ServerStats | None) -> Iterable[str]:
    if server is None or server.generation_tokens is None or window_s <= 0:
        return
    allowed = output_tokens * (_COUNT_TOLERANCE_FRAC + _SCRAPE_EDGE_S / window_s)
    if abs(server.generation_tokens - output_tokens) > allowed:
        yield (
            f"the server made {server.generation_tokens} tokens in the window, the client received {output_tokens}:"
            " somebody else uses the server, or tokens were lost"
        )


def _cautions(run: LoadRun) -> Iterable[str]:
    """Yield what a reader should know of figures that are good all the same."""
    if not run.steady:
        yield "the warm-up's longest time came before the speed was steady"
    duration_s = (run.end_ns - run.start_ns) / _NS
    if duration_s > 0 and run.cpu_s > _BUSIEST_CLIENT_FRAC * duration_s:
        yield f"the load client was busy {run.cpu_s / duration_s:.0%} of the time, so the limit may be its own"
    inside = [r for r in run.records if r.t_sched_ns is not None and r.counted]
    if not inside:
        return
    begun = sum(run.window_start_ns <= (r.t_sched_ns or 0) < run.window_end_ns for r in run.records)
    ended = sum(run.window_start_ns <= r.t_end_ns < run.window_end_ns and r.status == "ok" for r in run.records)
    if ended < _LEAST_FINISHED_FRAC * begun:
        yield f"the queue grew: {begun} requests came in the window, {ended} were finished; latencies grow with time"


def whole_run(run: LoadRun, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Give the counted requests' figures under the keys of `vllm bench serve`, by its definitions.

    Those differ: latencies begin when the client takes a request up, rates are totals over the time from the first
    start to the last end, and an inter-token latency is the gap between two events however many tokens they carried.
    """
    counted = [r for r in run.records if r.counted and r.status != "cancelled"]
    good = [r for r in counted if r.status == "ok"]
    begin = min((r.t_start_ns for r in counted), default=0)
    duration = (max((r.t_end_ns for r in counted), default=0) - begin) / _NS
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    ttft = [(r.chunks[0][0] - r.t_start_ns) / _NS for r in good]
    e2el = [(r.chunks[-1][0] - r.t_start_ns) / _NS for r in good]
    later = [r.output_tokens - 1 for r in good]
    tpot = [(end - first) / n for first, end, n in zip(ttft, e2el, later, strict=True) if n > 0]
    gaps = [(b[0] - a[0]) / _NS for r in good for a, b in zip(r.chunks, r.chunks[1:], strict=False)]

    def rate(count: int) -> float | None:
        return count / duration if duration > 0 else None

    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(counted) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(good)),
        "request_goodput": rate(sum(meets(r, slo) for r in good)) if slo else None,
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        **_milliseconds("ttft", ttft),
        **_milliseconds("tpot", tpot),
        **_milliseconds("itl", gaps),
        **_milliseconds("e2el", e2el),
    }


def _milliseconds(name: str, values: Sequence[float]) -> dict[str, float | None]:
    keys = ("mean", "median", "std", "p90", "p95", "p99")
    if not values:
        return {f"{key}_{name}_ms": None for key in keys}
    data = 1000 * np.asarray(values)
    found = (data.mean(), np.median(data), data.std(), *np.percentile(data, (90, 95, 99)))
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, found, strict=True)}
