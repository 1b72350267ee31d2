"""What one launch told of the device's memory, in bytes, at the values that it was made with. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweep.failure import Failure, FailureKind
from sweep.memory.sizes import number_of, size_of
from sweep.model import DeviceMemory, Flags, FlagValue, Outcome

UTILIZATION, TOKENS, SEQS = "gpu-memory-utilization", "max-num-batched-tokens", "max-num-seqs"
LENGTH, KV_BYTES = "max-model-len", "kv-cache-memory-bytes"
BLOCK, _BLOCKS, _PREFIXES = "block-size", "num-gpu-blocks-override", "enable-prefix-caching"
_SIZES = (UTILIZATION, TOKENS, SEQS, LENGTH, KV_BYTES, BLOCK)
# Flags that two launches may differ in and still be compared. They decide what the scheduler does with memory that has
# been set aside; profiling, loading and capturing go on without them.
_WITHOUT_SAY = frozenset(
    {
        "prefix-caching-hash-algo",
        "scheduling-policy",
        "long-prefill-token-threshold",
        "scheduler-reserve-full-isl",
        "stream-interval",
        "api-server-count",
        "seed",
    }
)
# What a driver counts as all of a device is up to one per cent more than a program on it is told.
_TOTAL_SEEN = {"nvml": 0.99, "numa": 1.0}
_SAME_DEVICE = 0.05  # of the whole: what is further apart is not the same device
# What sets other flags' defaults: beside it, a size that is not written down is not known.
_SETS_DEFAULTS = "performance-mode"


@dataclass(frozen=True, slots=True)
class Point:
    """The flags of a launch, as memory sees them. None: not known.

    others: all other flags that may matter, and sizes that cannot be read: such a value is like itself alone.
    prefixes: whether prefixes are kept, which in models with a state (Mamba) changes what one request needs.
    """

    utilization: float | None
    tokens: int | None
    seqs: int | None
    length: int | None
    kv_bytes: int | None
    block: int | None
    others: frozenset[str]
    prefixes: str

    @property
    def cache_is_set(self) -> bool:
        """Whether the KV cache has a size of its own, whatever profiling leaves."""
        set_by = (f"{_BLOCKS}=", f"{KV_BYTES}=")
        return self.kv_bytes is not None or any(flag.startswith(set_by) for flag in self.others)

    @property
    def sizes(self) -> tuple[int | None, ...]:
        return self.tokens, self.seqs, self.length

    def needs_no_less_than(self, other: Point) -> bool:
        """Tell whether batches, sequences and requests are all at least as large, and the other flags the same."""
        return self.others == other.others and all(map(_no_less, self.sizes, other.sizes))

    def leaves_no_more_than(self, other: Point) -> bool:
        """Tell whether the server's share of the memory is at least as large."""
        if self.kv_bytes is not None or other.kv_bytes is not None:
            return _no_less(self.kv_bytes, other.kv_bytes)
        return _no_less(self.utilization, other.utilization)

    def sized(self) -> str:
        """Say the sizes that decide how much a batch takes."""
        told = [f"{name} {value}" for name, value in ((TOKENS, self.tokens), (SEQS, self.seqs)) if value is not None]
        return " and ".join(told) or "these sizes"


def _no_less(value: float | None, other: float | None) -> bool:
    """Compare two values of a flag; that of an absent flag is unknown, but the same in both."""
    if value is None or other is None:
        return value is other
    return value >= other


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch told. Memory in bytes, as the server saw it; None: it did not say.

    started: the server was up, so all that it needs to start fitted. available: for the KV cache, may be negative.
    outside_least: no part of the KV cache, at least so much; exact: that is its measure, not only a limit.
    request: one request of `length` tokens needs at least so much, by the server's own word.
    memory: of the device, just before.
    """

    trial: int
    point: Point
    kind: FailureKind | None
    started: bool
    lasting: bool  # what it saw of free memory was not somebody else's doing
    total: float | None
    free: float | None
    requested: float | None
    available: float | None
    outside_least: float | None
    exact: bool
    weights: float | None
    graphs: float | None
    requests: tuple[tuple[int, float], ...]
    memory: DeviceMemory | None


def point_of(flags: Flags, defaults: Flags) -> Point:
    """Read the flags of a launch. defaults: values that hold where a flag is absent."""
    known = {name: value for name, value in {**defaults, **flags}.items() if value is not None}
    if _SETS_DEFAULTS in flags:
        for name in (TOKENS, SEQS):
            if name not in flags:
                known.pop(name, None)
    utilization = number_of(known.get(UTILIZATION))
    tokens, seqs, length, kv, block = sizes = [size_of(known.get(name)) for name in _SIZES[1:]]
    if known.get(KV_BYTES) in (0, "0"):
        known.pop(KV_BYTES)  # vLLM takes it for not set
    if str(known.get(LENGTH)).strip().lower() in {"-1", "auto"}:
        known[LENGTH] = "auto"  # as long as fits
    unread = {name for name, size in zip(_SIZES, (utilization, *sizes), strict=True) if size is None}
    others = frozenset(
        f"{name}={_text(value)}"
        for name, value in known.items()
        if (name in unread or name not in _SIZES) and name not in _WITHOUT_SAY and name != _PREFIXES
    )
    return Point(utilization, tokens, seqs, length, kv, block, others, _text(known.get(_PREFIXES)))


def _text(value: FlagValue) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def total_of(outcomes: Sequence[Outcome]) -> float | None:
    """Return all memory of the device as servers saw it, or at least so much; None where nobody looked."""
    told = [_told_total(outcome) for outcome in outcomes]
    seen = [seen_total(outcome.measured.memory) for outcome in outcomes]
    return next((total for total in [*reversed(told), *reversed(seen)] if total is not None), None)


def on_device(outcome: Outcome, memory: DeviceMemory) -> bool:
    """Tell whether a launch was on a device as large as this one, as far as that is known."""
    total, here = _first(_told_total(outcome), seen_total(outcome.measured.memory)), seen_total(memory)
    return total is None or here is None or abs(total - here) <= _SAME_DEVICE * here


def _told_total(outcome: Outcome) -> float | None:
    """Return all memory of the device as the server had it."""
    return _positive(outcome.measured.server.total_bytes, _named(outcome.measured.failure).get("total_bytes"))


def launch_of(outcome: Outcome, fixed: Flags, defaults: Flags, total: float | None) -> Launch | None:
    """Return what an outcome told; None where nothing was launched. total: of the device, where it is not said."""
    if outcome.state in {"skipped", "interrupted"}:
        return None
    measured = outcome.measured
    failure, facts = measured.failure, measured.server
    bounds = _named(failure)
    point = point_of({**fixed, **outcome.flags}, defaults)
    total = _first(_told_total(outcome), total)
    requested = _positive(facts.requested_bytes, bounds.get("requested_bytes"))
    if requested is None and total is not None and point.utilization is not None:
        requested = point.utilization * total
    available = _first(facts.available_kv_bytes, bounds.get("available_bytes"))
    started = failure is None or failure.phase == "load"
    if started and available is not None and available <= 0:
        available = None  # a server that is up has a cache
    lasting = failure is None or failure.treatment != "retry"
    outside, exact = _outside(point, failure, requested, available) if lasting else (None, False)
    return Launch(
        trial=outcome.trial,
        point=point,
        kind=failure.kind if failure else None,
        started=started,
        lasting=lasting,
        total=total,
        free=_positive(facts.free_bytes, _free(failure)),
        requested=requested,
        available=available,
        outside_least=outside,
        exact=exact,
        weights=_positive(facts.weights_bytes),
        graphs=_positive(facts.graphs_bytes),
        requests=tuple(_requests(outcome, bounds, cut=point.kv_bytes is None and point.cache_is_set)),
        memory=measured.memory if seen_total(measured.memory) is not None else None,
    )


def seen_total(memory: DeviceMemory | None) -> float | None:
    """Return at least what a server takes for all of a device; None where nobody looked."""
    if memory is None or memory.total_bytes <= 0 or memory.free_bytes < 0:
        return None
    total = number_of(memory.total_bytes)
    return None if total is None else _TOTAL_SEEN[memory.source] * total


def _free(failure: Failure | None) -> float | None:
    """Return what a refusal names as free at the start. Later refusals name what is left beside the server itself."""
    if failure is None or failure.kind != "oom_free_memory_lt_requested" or "kv cache allocation" in failure.evidence:
        return None
    return _named(failure).get("free_bytes")


def _named(failure: Failure | None) -> Mapping[str, float]:
    """Return the numbers that a failure's message names."""
    return (failure.bounds if failure else None) or {}


def _outside(
    point: Point, failure: Failure | None, requested: float | None, available: float | None
) -> tuple[float | None, bool]:
    """Return how much of its budget a launch kept from the KV cache, and whether that was measured."""
    if requested is None or point.cache_is_set:
        return None, False
    if available is not None:
        return requested - available, True
    if failure is not None and failure.kind == "oom_kv_cache_none":
        return requested, False
    return None, False


def _requests(outcome: Outcome, bounds: Mapping[str, float], *, cut: bool) -> list[tuple[int, float]]:
    """Return lengths, and the least that one request of each needs. cut: the cache is not all that was available."""
    found = []
    needed, length = _first(bounds.get("needed_bytes")), size_of(bounds.get("max_model_len_tokens"))
    if needed is not None and length is not None:
        found.append((length, needed))
    fitting, available = number_of(bounds.get("fitting_model_len_tokens")), _first(bounds.get("available_bytes"))
    if fitting is not None and fitting >= 0 and available is not None:
        found.append((int(fitting) + 1, available))
    facts = outcome.measured.server
    length, concurrency = size_of(facts.max_model_len), number_of(facts.max_concurrency)
    available = _first(facts.available_kv_bytes)
    if not cut and length and concurrency and concurrency > 0 and available is not None and available > 0:
        # Both figures are rounded, and the last block may be in part unused.
        found.append((length, 0.99 * available / concurrency))
    return found


def _first(*values: float | None) -> float | None:
    """Return the first number that can be one of a device: a damaged file may hold others."""
    return next((value for value in map(number_of, values) if value is not None), None)


def _positive(*values: float | None) -> float | None:
    return next((value for value in map(number_of, values) if value is not None and value > 0), None)
