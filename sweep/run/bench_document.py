"""What `bench` found, as a JSON document and as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sweep.load.client import Target
from sweep.measure.parity import whole_run
from sweep.model import ClientStats, Dist, KindStats, LevelStats, LoadRun
from sweep.run.measuring import first_error
from sweep.search.objectives import Objective, dist_of, value_of
from sweep.text import number, printable, quantity, slo_label

_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "icl_s")
_WHERE_MEASURED = ("ttft_sched_s", "e2e_sched_s", "ttfot_s")
_RATES = (
    ("request rate", "req/s", "request_rps"),
    ("output throughput", "tok/s", "output_tps"),
    ("total throughput", "tok/s", "total_tps"),
    ("goodput", "req/s", "goodput_rps"),
)
_ROWS = (
    ("ttft_ms", "TTFT"),
    ("ttft_sched_ms", "TTFT from schedule"),
    ("ttfot_ms", "time to first answer token"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("e2e_ms", "E2E"),
)
_STATS = ("mean", "p50", "p90", "p99")
_KIND_ROWS = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
_SERVER_ROWS = (
    ("queue_s", "mean time in the queue"),
    ("prefill_s", "mean prefill"),
    ("decode_s", "mean decode"),
)


def document(target: Target, run: LoadRun, stats: LevelStats, slo: Mapping[str, float]) -> dict[str, Any]:
    """Return the document that `--json` prints of one level on one endpoint. Times are in ms where a key says so."""
    assert stats.client is not None
    found: dict[str, Any] = {
        "base_url": target.base_url,
        "model": target.model,
        "level": stats.level,
        "completed": stats.completed,
        "failed": stats.failed,
        "cut_off": stats.cut_off,
        "errors": stats.errors,
        "first_error": first_error(run),
        "duration_s": stats.window_s,
        "request_rps": stats.request_rps,
        "output_tps": stats.output_tps,
        "total_tps": stats.total_tps,
        "intervals": {name: list(interval) for name, interval in stats.intervals.items()},
        **_latencies(stats, _LATENCIES),
        **{name: value for name, value in _latencies(stats, _WHERE_MEASURED).items() if value is not None},
        "prefix_offered_frac": stats.prefix_offered_frac,
        "warmup": {"seconds": stats.warmup_s, "requests": stats.warmup_requests, "steady": stats.steady},
        "whole_run": whole_run(run, slo),
        "client": _client(stats, stats.client),
    }
    if stats.arrivals is not None:
        found |= {"rate_rps": stats.rate_rps, "stable": stats.stable, "arrivals": asdict(stats.arrivals)}
    if slo:
        found["goodput_rps"] = stats.goodput_rps
        found["slo"] = {"attainment_frac": stats.slo_attainment_frac} | {
            name: _judged(stats, name, limit_s) for name, limit_s in slo.items()
        }
    if stats.kinds:
        found["kinds"] = {name: _kind(kind) for name, kind in stats.kinds.items()}
    if stats.server is not None:
        found["server"] = asdict(stats.server)
    return found


def _latencies(stats: LevelStats | KindStats, names: Sequence[str]) -> dict[str, Any]:
    return {f"{name.removesuffix('_s')}_ms": dist_ms(getattr(stats, name)) for name in names}


def dist_ms(found: Dist | None) -> dict[str, Any] | None:
    """Write a distribution in ms; ci: 95 % intervals where there are any, low_n: statistics of too few values."""
    if found is None:
        return None
    values: dict[str, Any] = {name: 1000 * getattr(found, name) for name in ("mean", "p50", "p90", "p95", "p99")}
    ci = {name: [1000 * end for end in ends] for name, ends in found.ci.items()}
    return {**values, "n": found.n, "ci": ci, "low_n": list(found.low_n)}


def _kind(kind: KindStats) -> dict[str, Any]:
    scheduled = ("ttft_sched_s", "e2e_sched_s")
    return {
        "completed": kind.completed,
        "failed": kind.failed,
        "attainment_frac": kind.slo_attainment_frac,
        **_latencies(kind, ("ttft_s", "tpot_s", "itl_s", "e2e_s")),
        **{name: value for name, value in _latencies(kind, scheduled).items() if value is not None},
    }


def _client(stats: LevelStats, client: ClientStats) -> dict[str, Any]:
    return {
        "cpu_us_per_event": client.cpu_us_per_event,
        "send_lag_ms": _ms(client.send_lag_p99_s),
        "stamp_source": client.stamp_source,
        "overhead_ms": _ms(client.overhead_s),
        "late_events_frac": client.late_events_frac,
        "unstamped_frac": client.unstamped_frac,
        "processes": client.processes,
        "busiest_frac": client.busiest_frac,
        "loop_lag_ms": _ms(client.loop_lag_p99_s),
        "tokens": client.tokens,
        "server_tokens": client.server_tokens,
        "valid": stats.valid,
        "reasons": list(stats.reasons),
    }


def _judged(stats: LevelStats, name: str, limit_s: float) -> dict[str, Any]:
    found = dist_of(stats, name)
    value_s = None if found is None else value_of(found, name)
    return {
        "limit_ms": 1000 * limit_s,
        "value_ms": _ms(value_s),
        "met": Objective(maximize="output_tps").with_limits({name: limit_s}).met(stats),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def table(docs: Sequence[Mapping[str, Any]]) -> str:
    """Lay documents out side by side, for people, with 95 % intervals where there are any."""
    several = len({doc["level"] for doc in docs}) > 1
    names = [f"{doc['base_url']} {doc['level']}" if several else str(doc["base_url"]) for doc in docs]
    rows = [["", *names], *_rows(docs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(doc["ttft_ms"] and doc["ttft_ms"]["low_n"] for doc in docs):
        lines.append("low n: too few requests for the figure to be more than a hint")
    for name, doc in zip(names, docs, strict=True):
        failures = [f"{count} requests ended as {kind}" for kind, count in doc["errors"].items()]
        words = [f"the first of them: {printable(doc['first_error'])}"] if doc.get("first_error") else []
        if not doc["client"]["valid"]:
            lines.append(f"INVALID, {name}: do not trust these figures; the notes say why")
        lines += [f"note, {name}: {reason}" for reason in (*doc["client"]["reasons"], *failures, *words)]
    return "\n".join(lines)


def _rows(docs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    yield ["requests completed", *(number(doc["completed"]) for doc in docs)]
    yield ["requests failed", *(number(doc["failed"]) for doc in docs)]
    if any(doc.get("rate_rps") for doc in docs):
        yield ["rate asked for", *(quantity(doc.get("rate_rps"), "req/s") for doc in docs)]
    for label, unit, key in _RATES:
        if any(doc.get(key) is not None for doc in docs):
            yield [label, *(_cell(doc.get(key), unit, doc["intervals"].get(key)) for doc in docs)]
    for key, label in _ROWS:
        for stat in _STATS:
            if any(doc.get(key) for doc in docs):
                yield [f"{label} {stat}", *(_latency_cell(doc.get(key), stat) for doc in docs)]
    yield from _kind_rows(docs)
    yield from _server_rows(docs)
    for name in (name for name in docs[0].get("slo", {}) if name != "attainment_frac"):
        yield [f"SLO {slo_label(name)}", *("met" if doc["slo"][name]["met"] else "missed" for doc in docs)]
    if any(doc["client"]["overhead_ms"] is not None for doc in docs):
        yield ["TTFT, client - server", *(quantity(doc["client"]["overhead_ms"], "ms") for doc in docs)]


def _kind_rows(docs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for kind in sorted({kind for doc in docs for kind in doc.get("kinds", {})}):
        parts = [doc.get("kinds", {}).get(kind, {}) for doc in docs]
        for key, label in _KIND_ROWS:
            yield [f"{kind}: {label} p99", *(_latency_cell(part.get(key), "p99") for part in parts)]


def _server_rows(docs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for key, label in _SERVER_ROWS:
        values = [(doc.get("server") or {}).get(key) for doc in docs]
        if any(value is not None for value in values):
            yield [label, *(quantity(_ms(value), "ms") for value in values)]


def _cell(value: float | None, unit: str, interval: Sequence[float] | None) -> str:
    text = quantity(value, unit)
    return text if value is None or not interval else f"{text} [{number(interval[0])}, {number(interval[1])}]"


def _latency_cell(found: Mapping[str, Any] | None, stat: str) -> str:
    if not found:
        return "-"
    text = _cell(found[stat], "ms", found["ci"].get(stat))
    return f"{text}, low n" if stat in found["low_n"] else text
