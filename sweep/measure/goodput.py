"""Which limits a request has missed, and how many of the requests were good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from sweep.measure.latency import e2e_s, e2e_sched_s, itl_s, tpot_s, ttft_s, ttft_sched_s
from sweep.model import RequestRecord
from sweep.slo import split_slo

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Cohort:
    """The counted requests, sorted by whether they met every limit. cut_off: ended before that was known."""

    good: tuple[RequestRecord, ...]
    missed: tuple[RequestRecord, ...]
    cut_off: tuple[RequestRecord, ...]

    @property
    def judged(self) -> int:
        return len(self.good) + len(self.missed)


def cohort(records: Iterable[RequestRecord], slo: Mapping[str, float]) -> Cohort:
    """Sort the counted ones of the records. Whatever failed has missed; so has what was cut off beyond a limit."""
    good, missed, cut_off = [], [], []
    for record in records:
        if not record.counted:
            continue
        beyond = any(misses(record, slo).values())
        if record.status == "cancelled" and not beyond:
            cut_off.append(record)
        elif record.status == "ok" and not beyond:
            good.append(record)
        else:
            missed.append(record)
    return Cohort(tuple(good), tuple(missed), tuple(cut_off))


def misses(record: RequestRecord, slo: Mapping[str, float]) -> dict[str, bool]:
    """Tell which limits a request has missed: SLO name -> missed, for the names that apply to its class.

    slo: name -> limit in seconds, which is also the limit of each single request, whatever statistic the name has. In
    an open loop TTFT and E2E count from the schedule. What failed has missed everything. A request of a single event
    has no time per output token and cannot miss such a limit. Of a request that was cut off only what is certain is
    told: its TTFT if it had one, and what it had already exceeded.
    """
    found = {}
    for name, limit_s in slo.items():
        kind, latency, stat = split_slo(name)
        if kind is None or kind == record.kind:
            missed = _missed(record, latency, stat, limit_s)
            if missed is not None:
                found[name] = missed
    return found


def _missed(record: RequestRecord, latency: str, stat: str, limit_s: float) -> bool | None:
    if record.status == "cancelled":
        return _surely_missed(record, latency, limit_s)
    if record.status != "ok":
        return True
    value = _value_s(record, latency, stat)
    return value is not None and value > limit_s


def _value_s(record: RequestRecord, latency: str, stat: str) -> float | None:
    scheduled = record.t_sched_ns is not None
    if latency == "ttft":
        return ttft_sched_s(record) if scheduled else ttft_s(record)
    if latency == "e2e":
        return e2e_sched_s(record) if scheduled else e2e_s(record)
    if latency == "tpot":
        return tpot_s(record)
    gaps = itl_s(record)
    if not len(gaps):
        return None
    return float(gaps.mean() if stat == "mean" else np.percentile(gaps, float(stat.removeprefix("p"))))


def _surely_missed(record: RequestRecord, latency: str, limit_s: float) -> bool | None:
    """Judge a request that the end of the load cut off; None where its rest could have gone either way."""
    begun = record.t_sched_ns if record.t_sched_ns is not None else record.t_send_ns
    if begun is None:
        return None
    if latency == "ttft" and record.chunks:
        return (record.chunks[0][0] - begun) / _NS > limit_s
    if latency in {"ttft", "e2e"}:
        return True if (record.t_end_ns - begun) / _NS > limit_s else None
    if latency == "tpot" and record.chunks:
        first, count = record.chunks[0]
        later = record.requested_tokens - count  # the most that could have come
        return True if later > 0 and (record.t_end_ns - first) / later / _NS > limit_s else None
    return None
