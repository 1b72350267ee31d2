"""Limits on latencies as people write them: {"ttft_p99": "500ms"}."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from sweep.model import FEWEST
from sweep.section import did_you_mean

LATENCY_NAMES: tuple[str, ...] = ("ttft", "tpot", "itl", "e2e")
SLO_NAMES: tuple[str, ...] = tuple(f"{latency}_{stat}" for latency in LATENCY_NAMES for stat in FEWEST)
# The share of requests that a statistic leaves out, so that so many may miss its limit. A mean leaves none out, but one
# request in a hundred that failed does not yet condemn it.
TAIL_FRAC: Mapping[str, float] = {"mean": 0.01, "p50": 0.50, "p90": 0.10, "p95": 0.05, "p99": 0.01}
KNOWN_WORDS = f"{', '.join(LATENCY_NAMES)}, each with {', '.join('_' + stat for stat in FEWEST)} (such as ttft_p99)"


def split_slo(name: str) -> tuple[str | None, str, str]:
    """Take a name apart: "ttft_p99" -> (None, "ttft", "p99"), "chat.ttft_p99" -> ("chat", "ttft", "p99")."""
    kind, dot, rest = name.rpartition(".")
    latency, _, stat = rest.partition("_")
    return (kind if dot else None), latency, stat


def read_slo(raw: Mapping[Any, Any]) -> dict[str, float]:
    """Read limits into seconds. Raises ValueError for a name that is none, and for a duration without a unit."""
    return {_name(name): read_duration_s(name, limit) for name, limit in raw.items()}


def _name(name: object) -> str:
    if name in SLO_NAMES:
        return str(name)
    if str(name).endswith(("_tps", "_rps", "_per_gpu")):
        raise ValueError(f"{name} is a rate; limits are set on latencies: {KNOWN_WORDS}")
    hint = did_you_mean(str(name), SLO_NAMES).replace("-", "_")
    raise ValueError(f"unknown latency {name!r}{hint}; known are {KNOWN_WORDS}")


def read_duration_s(name: object, raw: object) -> float:
    """Read "200ms" or "0.2s" into seconds; raises ValueError, with the name in its words."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(ms|s)?\s*", str(raw))
    if match is None or isinstance(raw, bool):
        raise ValueError(f"{name}: {raw!r} is no duration; write 200ms or 0.2s")
    if match[2] is None:
        raise ValueError(f"{name}: {raw} has no unit; write {raw}ms or {raw}s")
    limit_s = float(match[1]) / (1000 if match[2] == "ms" else 1)
    if not 0 < limit_s < math.inf:
        raise ValueError(f"{name}: the limit must be above 0, not {raw}")
    return limit_s


def _read(raw: Any) -> Any:
    return read_slo(raw) if isinstance(raw, dict) else raw


def _written(slo: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{limit_s!r}s" for name, limit_s in slo.items()}


# A section's limits: durations in YAML and in JSON, seconds in the program.
Limits: TypeAlias = Annotated[dict[str, float], BeforeValidator(_read), PlainSerializer(_written)]
