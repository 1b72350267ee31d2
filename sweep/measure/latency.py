"""The latencies of one request, and distributions of many. All in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sweep.measure.intervals import Floats, mean_interval, percentile_interval
from sweep.model import Dist, RequestRecord

_NS = 1e9
_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


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


def ttfot_s(record: RequestRecord) -> float | None:
    """Time to the first token that is not reasoning, from the first byte sent; None where there is none to tell."""
    if record.answer_ns is None or record.t_send_ns is None:
        return None
    return (record.answer_ns - record.t_send_ns) / _NS


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


def icl_s(record: RequestRecord) -> Floats:
    """Inter-chunk latencies: the gaps between events with tokens, which is what a reader sees as a stall."""
    return np.diff(np.array([at for at, _ in record.chunks], dtype=np.int64)) / _NS


def itl_s(record: RequestRecord) -> Floats:
    """Inter-token latencies: an event's gap is shared among the tokens that it carried, one value for each of them."""
    counts = np.array([count for _, count in record.chunks[1:]], dtype=np.int64)
    return np.repeat(icl_s(record) / counts, counts)


def dist(values: Sequence[float] | Floats, independent: int | None = None) -> Dist | None:
    """Summarise values in the order of their time; None if there are none.

    independent: how many of them are independent of each other, where that is fewer than all.
    """
    if not len(values):
        return None
    data = np.asarray(values, dtype=float)
    p50, p90, p95, p99 = (float(p) for p in np.quantile(data, list(_PERCENTILES.values())))
    ordered = np.sort(data)
    ci = {name: percentile_interval(ordered, p, independent) for name, p in _PERCENTILES.items()}
    ci = {"mean": mean_interval(data, independent), **ci}
    return Dist(
        mean=float(data.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        n=len(data),
        ci={name: interval for name, interval in ci.items() if interval is not None},
    )


def dist_of(records: Iterable[RequestRecord], latency: Callable[[RequestRecord], float | None]) -> Dist | None:
    """Summarise one latency of many requests, which come in the order of their time."""
    return dist([value for record in records if (value := latency(record)) is not None])


def gap_dist(records: Iterable[RequestRecord], gaps: Callable[[RequestRecord], Floats]) -> Dist | None:
    """Summarise the gaps of many answers. Those of one answer count as one where an interval is to be found."""
    found = [values for record in records if len(values := gaps(record))]
    return dist(np.concatenate(found), independent=len(found)) if found else None
