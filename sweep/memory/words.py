"""An estimate in words for people."""

from __future__ import annotations

from sweep.memory.estimate import Estimate

_GIB = 2**30


def estimate_words(expected: Estimate) -> str:
    """Say what is expected of the baseline's launch: what it takes, and what that leaves for the KV cache."""
    exact = "" if expected.weights_exact else " (estimated from the architecture)"
    taken = expected.weights_bytes + expected.activations_bytes + expected.overhead_bytes
    words = f"Memory, as expected of the baseline: {_gib(expected.weights_bytes)} of weights{exact}"
    words += f", {_gib(taken)} with batches and libraries"
    if expected.unusual:
        words += f" (what {', '.join(expected.unusual)} may change is not counted)"
    if expected.kv_bytes is None or expected.requested_bytes is None:
        return f"{words}; the device's memory is not known."
    if (reason := expected.certain or expected.likely) is not None:
        sure = "cannot run" if expected.certain else "will probably not run"
        return f"The baseline {sure} beside what is free now: {reason}."
    words += f"; of {_gib(expected.requested_bytes)} that leaves {_gib(expected.kv_bytes)} for the KV cache"
    if expected.error_bytes:
        words += f", give or take {_gib(expected.error_bytes)}"
    if expected.kv_tokens is not None:
        words += f": {expected.kv_tokens:,} tokens"
    if expected.max_concurrency is not None:
        words += f", {expected.max_concurrency:,.1f} requests of full length at a time"
    return f"{words}. The first launch will tell."


def _gib(value: float) -> str:
    if abs(value) < _GIB / 10:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value / _GIB:.2f} GiB" if abs(value) < 100 * _GIB else f"{value / _GIB:,.0f} GiB"
