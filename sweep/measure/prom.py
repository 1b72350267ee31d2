"""What a server's own metrics say: samples of /metrics, and differences of them as ServerStats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sweep.model import ServerStats

Samples: TypeAlias = "tuple[Sample, ...]"

# Means of histograms: sum and count of what finished in between. Names are those of the samples, since the type that a
# metric declares does not always tell: vllm:iteration_tokens_total is a histogram.
_MEANS = {
    "queue_s": "vllm:request_queue_time_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds",
    "decode_s": "vllm:request_decode_time_seconds",
    "ttft_s": "vllm:time_to_first_token_seconds",
    "e2e_s": "vllm:e2e_request_latency_seconds",
}
_COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hits_tokens": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
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
        count = _growth(before, after, f"{name}_count")
        seconds = _growth(before, after, f"{name}_sum")
        found[field] = seconds / count if count and seconds is not None else None
    for field, name in _COUNTERS.items():
        growth = _growth(before, after, name)
        found[field] = None if growth is None else round(growth)
    scrapes = [before, *gauges, after]
    for field, name in GAUGES.items():
        seen = [value for samples in scrapes if (value := total(samples, name)) is not None]
        found[field] = max(seen, default=None)
    return ServerStats(**{field.name: found[field.name] for field in fields(ServerStats)})  # type: ignore[arg-type]


def _growth(before: Samples, after: Samples, name: str) -> float | None:
    first, last = total(before, name), total(after, name)
    return last - first if first is not None and last is not None and last >= first else None


def cache_config(samples: Samples) -> Mapping[str, str]:
    """Return the labels of vllm:cache_config_info: how the running server resolved its cache settings."""
    return next((sample.labels for sample in samples if sample.name == _INFO), {})
