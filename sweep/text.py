"""How names and measurements are written for people: one spelling for the terminal, the tables and the report."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping

from sweep.failure import Failure, FailureKind
from sweep.model import Flags, FlagValue, Outcome

# Escape sequences go as a whole: without its ESC, "[31m" would stay behind.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")
# Control and format characters (bidirectional overrides among them), surrogates, and the line ends of Unicode.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

FAILURE_WORDS: Mapping[FailureKind, str] = {
    "oom_weights": "out of memory: the weights do not fit",
    "oom_activation_profile": "out of memory: the largest batch does not fit",
    "oom_kv_cache_none": "out of memory: no room for the KV cache",
    "oom_kv_cache_too_small": "out of memory: the KV cache is too small for one request",
    "oom_free_memory_lt_requested": "out of memory: less is free than gpu-memory-utilization asks for",
    "oom_cudagraph_capture": "out of memory while capturing CUDA graphs",
    "oom_sampler_warmup": "out of memory while warming up the sampler",
    "oom_runtime": "out of memory under load",
    "host_oom_killed": "killed by the system: host memory ran out",
    "invalid_argument": "vLLM refuses these flags",
    "unsupported_feature": "not supported by this model, device or build",
    "version_mismatch": "versions do not fit together",
    "model_not_found": "model not found",
    "auth_gated_model": "no access to the model",
    "trust_remote_code_needed": "the model needs code of its own",
    "port_in_use": "port in use",
    "gpu_busy_other_process": "another process uses the GPU",
    "nccl_or_distributed": "the GPUs could not talk to each other",
    "hang_timeout": "no progress in time",
    "engine_dead": "the engine died",
    "client_404_model_name": "the server does not know the model's name",
    "client_401": "the server refused the key",
    "client_timeout": "requests timed out",
    "healthy": "nothing wrong found",
    "other": "other cause",
}


def printable(text: str) -> str:
    """Return text on one line without anything that a terminal, a YAML comment or a reader's eye could be fooled by."""
    plain = "".join(" " if unicodedata.category(c) in _INVISIBLE else c for c in _ESCAPES.sub("", text))
    return " ".join(plain.split())


def flag_value(value: FlagValue) -> str:
    """Write a flag's value as YAML would: true, 0.9, a word, or JSON for lists and mappings."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flag_words(flags: Flags) -> str:
    return printable(" ".join(f"{name}={flag_value(value)}" for name, value in flags.items()))


def failure_words(failure: Failure) -> str:
    """Say in a few words what went wrong; an unknown cause is told by its evidence."""
    if failure.kind in {"other", "invalid_argument", "unsupported_feature"} and failure.evidence:
        return shortened(f"{FAILURE_WORDS[failure.kind]}: {printable(failure.evidence)}", 160)
    return FAILURE_WORDS[failure.kind]


def outcome_words(outcome: Outcome) -> str:
    """Say in a few words why a trial gave no result; "" where nothing went wrong."""
    failure = outcome.measured.failure
    if failure is None:
        return ""
    return shortened(printable(failure.evidence), 240) if outcome.state == "skipped" else failure_words(failure)


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def number(value: float) -> str:
    """Three significant digits or more, never an exponent: 0.123, 4.56, 78.9, 412, 1,842."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def quantity(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{number(value)} {unit}".rstrip()


def limit_words(limit_s: float) -> str:
    """Write an SLO's limit as people write it: 500 ms, 2 s."""
    return quantity(limit_s * 1000, "ms") if limit_s < 1 else quantity(limit_s, "s")


def slo_label(name: str) -> str:
    """ttft_p99 -> TTFT p99; chat.ttft_p99 -> chat TTFT p99."""
    kind, _, latency = name.rpartition(".")
    metric, _, rest = latency.partition("_")
    return printable(f"{kind} {metric.upper()} {rest.replace('_', ' ')}")


def percent(frac: float, digits: int = 1) -> str:
    """Write a signed change: +7.0 %; what rounds to nothing is 0."""
    rounded = round(100 * frac, digits)
    return f"{rounded:+.{digits}f} %" if rounded else "0 %"


def duration(seconds: float) -> str:
    total = max(0, round(seconds))
    if total < 100:
        return f"{total} s"
    minutes = round(total / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
