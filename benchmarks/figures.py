"""Figures of the truth, and how far a client's figures are from them. Milliseconds throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = ("ttft", "tpot", "e2e")
STATS = ("mean", "p50", "p99")
Figures = dict[str, dict[str, float | None]]  # metric -> statistic -> milliseconds


@dataclass(frozen=True, slots=True)
class Report:
    """What a client says of its run."""

    figures: Figures
    completed: int
    failed: int
    output_tokens: int | None  # of the completed requests
    own: dict[str, Any] = field(default_factory=dict)  # whatever else it says of itself


def truth_figures(entries: Sequence[Mapping[str, Any]]) -> Figures:
    """Compute TTFT, TPOT and E2E of requests from the server's own stamps.

    TTFT = first write with a token - last byte of the request; E2E likewise of the last such write;
    TPOT = (last - first) / (tokens - those of the first write), of the requests that have more than one such write.
    """
    values: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for entry in entries:
        writes = entry["writes"]
        (first, head), last = writes[0], writes[-1][0]
        values["ttft"].append((first - entry["recv_ns"]) / 1e6)
        values["e2e"].append((last - entry["recv_ns"]) / 1e6)
        later = sum(count for _, count in writes) - head
        if later:
            values["tpot"].append((last - first) / later / 1e6)
    return {metric: _stats(found) for metric, found in values.items()}


def _stats(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(STATS)
    return {
        "mean": float(np.mean(values)),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
    }


def counted(truth: Mapping[str, Any], counts: Callable[[Sequence[str]], set[str]]) -> list[Mapping[str, Any]]:
    """Return the requests that a client counted and that came to their end. counts: picks those ids from all."""
    requests: list[Mapping[str, Any]] = truth["requests"]
    ids = counts([request["x_request_id"] for request in requests])
    return [r for r in requests if r["x_request_id"] in ids and r["ended"] == "done" and r["writes"]]


def errors(found: Figures, true: Figures) -> dict[str, float | None]:
    """Return "ttft_p99" -> relative error; None where one of the two is missing."""
    result: dict[str, float | None] = {}
    for metric in METRICS:
        for stat in STATS:
            said, real = found.get(metric, {}).get(stat), true[metric][stat]
            result[f"{metric}_{stat}"] = None if said is None or not real else said / real - 1
    return result
