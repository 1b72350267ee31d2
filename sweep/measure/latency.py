"""The latencies of one request, and distributions of many. All in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sweep.model import Dist, RequestRecord

_NS = 1e9


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token, from the first byte sent to the first event that carried a token."""
    if not record.chunks or record.t_send_ns is None:
        return None
    return (record.chunks[0][0] - record.t_send_ns) / _NS


def ttft_sched_s(record: RequestRecord) -> float | None:
    """The same from the time at which the request was due: what a user waits, however late the client was."""
    if not record.chunks or record.t_sched_ns is None:
        return None
    return (record.chunks[0][0] - record.t_sched_ns) / _NS


def e2e_s(record: RequestRecord) -> float | None:
    """End-to-end latency, from the first byte sent to the last event that carried a token."""
    if not record.chunks or record.t_send_ns is None:
        return None
    return (record.chunks[-1][0] - record.t_send_ns) / _NS


def e2e_sched_s(record: RequestRecord) -> float | None:
    if not record.chunks or record.t_sched_ns is None:
        return None
    return (record.chunks[-1][0] - record.t_sched_ns) / _NS


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first event: (t_last - t_first) / (N - k_first). A single event has none."""
    if not record.chunks:
        return None
    first, last = record.chunks[0], record.chunks[-1]
    later = sum(count for _, count in record.chunks) - first[1]
    return (last[0] - first[0]) / later / _NS if later else None


def itl_s(record: RequestRecord) -> list[float]:
    """Inter-token latencies: an event's gap is shared among the tokens that it carried, one value for each of them."""
    values: list[float] = []
    for (before, _), (at, count) in zip(record.chunks, record.chunks[1:], strict=False):
        values += [(at - before) / count / _NS] * count
    return values


def dist(values: Sequence[float]) -> Dist | None:
    """Summarise values; None if there are none."""
    if not len(values):
        return None
    data = np.asarray(values, dtype=float)
    p50, p90, p95, p99 = (float(p) for p in np.percentile(data, (50, 90, 95, 99)))
    return Dist(float(data.mean()), p50, p90, p95, p99, len(data))
