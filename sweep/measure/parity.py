"""The figures of `vllm bench serve`, under its keys and by its definitions, for whoever compares the two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sweep.model import LoadRun, RequestRecord
from sweep.slo import split_slo

_NS = 1e9


def whole_run(run: LoadRun, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Give the counted requests' figures under the keys of `vllm bench serve`, by its definitions (vLLM 0.32).

    Those differ: latencies begin when the client takes a request up, rates are totals over the time from the first
    start to the last end, and an inter-token latency is the gap between two events however many tokens they carried. So
    are the peaks: events in a second, and requests that were under way at any time of a second. Goodput knows limits on
    ttft, tpot and e2e only. Left out is what is of other tasks (rtfx) or of each request. A figure that nothing
    measured is None, where vLLM writes 0.
    """
    counted = [r for r in run.records if r.counted and r.status != "cancelled"]
    good = [r for r in counted if r.status == "ok"]
    begin = min((r.t_start_ns for r in counted), default=0)
    duration = (max((r.t_end_ns for r in counted), default=0) - begin) / _NS
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    tpots = [value for r in good if (value := _tpot_s(r)) is not None]
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
        "request_goodput": rate(sum(_is_good(r, slo) for r in good)) if slo else None,
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        **_peaks(good),
        **_milliseconds("ttft", [_ttft_s(r) for r in good]),
        **_milliseconds("tpot", tpots),
        **_milliseconds("itl", gaps),
        **_milliseconds("e2el", [_e2el_s(r) for r in good]),
    }


def _ttft_s(record: RequestRecord) -> float:
    return (record.chunks[0][0] - record.t_start_ns) / _NS


def _e2el_s(record: RequestRecord) -> float:
    return (record.chunks[-1][0] - record.t_start_ns) / _NS


def _tpot_s(record: RequestRecord) -> float | None:
    later = record.output_tokens - 1
    return (_e2el_s(record) - _ttft_s(record)) / later if later > 0 else None


def _is_good(record: RequestRecord, slo: Mapping[str, float]) -> bool:
    values = {"ttft": _ttft_s(record), "tpot": _tpot_s(record) or 0.0, "e2e": _e2el_s(record)}
    for name, limit_s in slo.items():
        kind, latency, _ = split_slo(name)
        if kind in {None, record.kind} and values.get(latency, 0.0) > limit_s:
            return False
    return True


def _peaks(good: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Count in seconds from the first start: events, and requests that touch the second."""
    if not good:
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    begin = min(r.t_start_ns for r in good)
    seconds = math.ceil((max(r.chunks[-1][0] for r in good) - begin) / _NS) + 1
    events = np.array([at for r in good for at, _ in r.chunks], dtype=np.int64)
    changes = np.zeros(seconds + 1)
    for record in good:
        changes[int((record.t_start_ns - begin) / _NS)] += 1
        changes[int((record.chunks[-1][0] - begin) / _NS) + 1] -= 1
    return {
        "max_output_tokens_per_s": float(np.bincount(((events - begin) / _NS).astype(int)).max()),
        "max_concurrent_requests": int(np.cumsum(changes).max()),
    }


def _milliseconds(name: str, values: Sequence[float]) -> dict[str, float | None]:
    keys = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    if not values:
        return {f"{key}_{name}_ms": None for key in keys}
    data = 1000 * np.asarray(values)
    found = (data.mean(), np.median(data), data.std(), *np.percentile(data, (50, 90, 95, 99)))
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, found, strict=True)}
