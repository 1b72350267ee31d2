"""What a server's own metrics say: samples of /metrics, and differences of them as ServerStats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sweep.model import ServerStats

Samples: TypeAlias = "tuple[Sample, ...]"
Scrapes: TypeAlias = "Sequence[tuple[int, Samples]]"  # (perf_counter_ns, samples), in the order of time

TTFT = "vllm:time_to_first_token_seconds"
GENERATED = "vllm:generation_tokens_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"

# Means of histograms: sum and count of what finished in between. Names are those of the samples, since the type that a
# metric declares does not always tell: vllm:iteration_tokens_total is a histogram.
_MEANS = {
    "queue_s": "vllm:request_queue_time_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds",
    "decode_s": "vllm:request_decode_time_seconds",
    "ttft_s": TTFT,
    "e2e_s": "vllm:e2e_request_latency_seconds",
}
_COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hits_tokens": PREFIX_HITS,
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": GENERATED,
}
GAUGES = {
    "kv_usage_peak_frac": "vllm:kv_cache_usage_perc",
    "running_peak": "vllm:num_requests_running",
    "waiting_peak": "vllm:num_requests_waiting",
}
_INFO = "vllm:cache_config_info"
# What is parsed at all: parsing everything takes long enough to be felt by a client on the same event loop.
_WANTED = (
    _INFO,
    *(f"{name}_{part}" for name in _MEANS.values() for part in ("sum", "count")),
    *_COUNTERS.values(),
    *GAUGES.values(),
)


def parse(text: str) -> Samples:
    """Read the text format of /metrics and keep the samples that are used here. Raises ValueError for other text."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    return tuple(sample for family in families for sample in family.samples if sample.name in _WANTED)


def total(samples: Samples, name: str) -> float | None:
    """Sum a sample over its labels (a server may have several engines); None if there is none of that name."""
    values = [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]
    return sum(values) if values else None


def server_stats(before: Samples, after: Samples, gauges: Iterable[Samples] = ()) -> ServerStats:
    """Compare two scrapes of one server; gauges are taken at their highest over all scrapes given.

    A counter that went down belongs to another process: its figure stays None.
    """
    found: dict[str, float | int | None] = {}
    for field, name in _MEANS.items():
        seconds, count = mean_growth(before, after, name)
        found[field] = seconds if count else None
    for field, name in _COUNTERS.items():
        value = growth(before, after, name)
        found[field] = None if value is None else round(value)
    scrapes = [before, *gauges, after]
    for field, name in GAUGES.items():
        seen = [value for samples in scrapes if (value := total(samples, name)) is not None]
        found[field] = max(seen, default=None)
    return ServerStats(**{field.name: found[field.name] for field in fields(ServerStats)})  # type: ignore[arg-type]


def growth(before: Samples, after: Samples, name: str) -> float | None:
    """Return by how much a counter grew; None if one of the scrapes lacks it, or if it went down."""
    first, last = total(before, name), total(after, name)
    return last - first if first is not None and last is not None and last >= first else None


def mean_growth(before: Samples, after: Samples, name: str) -> tuple[float | None, int]:
    """Return the mean of what a histogram took up between two scrapes, in its own unit, and how many values it were."""
    count, value = growth(before, after, f"{name}_count"), growth(before, after, f"{name}_sum")
    return (value / count if count and value is not None else None), round(count or 0)


def between(scrapes: Scrapes, start_ns: int, end_ns: int) -> Scrapes:
    """Return the scrapes from the one nearest to the start to the one nearest to the end; none if that is the same."""
    if not scrapes:
        return ()
    first, last = (min(range(len(scrapes)), key=lambda i: abs(scrapes[i][0] - at)) for at in (start_ns, end_ns))
    return scrapes[first : last + 1] if first < last else ()


def around(scrapes: Scrapes, start_ns: int, end_ns: int) -> Scrapes:
    """Return the scrapes from the last one before the start to the first one after the end; none if one is missing."""
    before = [index for index, (at, _) in enumerate(scrapes) if at <= start_ns]
    after = [index for index, (at, _) in enumerate(scrapes) if at >= end_ns]
    return scrapes[before[-1] : after[0] + 1] if before and after else ()


def window_stats(scrapes: Scrapes, start_ns: int, end_ns: int) -> ServerStats | None:
    """Return what the server says of the time between; None without two scrapes."""
    found = [samples for _, samples in between(scrapes, start_ns, end_ns)]
    return server_stats(found[0], found[-1], found) if found else None


def restarted(scrapes: Scrapes) -> bool:
    """Tell whether a counter went down from one scrape to the next: another process answers than before."""
    values = [(total(samples, GENERATED), total(samples, f"{TTFT}_count")) for _, samples in scrapes]
    return any(
        old is not None and new is not None and new < old
        for before, after in pairwise(values)
        for old, new in zip(before, after, strict=True)
    )


def cache_config(samples: Samples) -> Mapping[str, str]:
    """Return the labels of vllm:cache_config_info: how the running server resolved its cache settings."""
    return next((sample.labels for sample in samples if sample.name == _INFO), {})
