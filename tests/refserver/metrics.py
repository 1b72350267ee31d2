"""`/metrics` under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tests.refserver.truth import Entry

_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_TIMES = {
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
}
_ZEROS = ("prefix_cache_hits", "num_preemptions")
_CONFIG = {
    "block_size": "16",
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.9",
    "num_gpu_blocks": "4096",
    "engine": "0",
}


class Metrics:
    """Counts tokens in plain integers while it is being measured; the families are made when somebody asks.

    As in vLLM the prompt and the time to first token are noted when that token is made, the other times at the end.
    """

    def __init__(self, model: str) -> None:
        self.running = 0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.queried_tokens = 0
        self._labels = {"model_name": model, "engine": "0"}
        self._registry = CollectorRegistry()
        names = list(self._labels)
        self._times = {
            name: Histogram(f"vllm:{name}", words, names, registry=self._registry, buckets=_BUCKETS).labels(
                **self._labels
            )
            for name, words in _TIMES.items()
        }
        self._success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*names, "finished_reason"],
            registry=self._registry,
        )
        self._registry.register(self)

    def first_token(self, entry: Entry, at_ns: int) -> None:
        self.prompt_tokens += entry.prompt_tokens
        self._times["time_to_first_token_seconds"].observe((at_ns - entry.received_ns) / 1e9)

    def finished(self, entry: Entry, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()
        if not entry.writes:
            return
        ttft_s = (entry.writes[0][0] - entry.received_ns) / 1e9
        decode_s = (entry.writes[-1][0] - entry.writes[0][0]) / 1e9
        for name, seconds in {
            "e2e_request_latency_seconds": ttft_s + decode_s,
            "request_queue_time_seconds": 0.0,
            "request_inference_time_seconds": ttft_s + decode_s,
            "request_prefill_time_seconds": ttft_s,
            "request_decode_time_seconds": decode_s,
        }.items():
            self._times[name].observe(seconds)

    def collect(self) -> Iterator[Any]:
        counters = {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generated_tokens,
            "prefix_cache_queries": self.queried_tokens,
        } | dict.fromkeys(_ZEROS, 0)
        for name, value in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", name, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        gauges = {"num_requests_running": self.running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0}
        for name, number in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), number)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(_CONFIG)
        )
        info.add_metric(list(_CONFIG.values()), 1)
        yield info

    def render(self) -> bytes:
        return generate_latest(self._registry)
