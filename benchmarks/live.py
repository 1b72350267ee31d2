"""What a running server says of itself: the only other opinion where there is no truth."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_WANTED = {
    "vllm:time_to_first_token_seconds_sum": "ttft_sum_s",
    "vllm:time_to_first_token_seconds_count": "ttft_count",
    "vllm:generation_tokens_total": "tokens",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over all engines since the server's start."""

    ttft_sum_s: float = 0.0
    ttft_count: float = 0.0
    tokens: float = 0.0

    def since(self, before: Counters) -> tuple[float | None, int]:
        """Return (mean TTFT in ms, tokens generated) of what came after `before`."""
        count = self.ttft_count - before.ttft_count
        mean_ms = 1000 * (self.ttft_sum_s - before.ttft_sum_s) / count if count else None
        return mean_ms, round(self.tokens - before.tokens)


def counters(url: str) -> Counters:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:  # noqa: S310 - the user names it
        text = response.read().decode()
    totals = dict.fromkeys(_WANTED.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _WANTED:
                totals[_WANTED[sample.name]] += sample.value
    return Counters(**totals)
