"""What a launch will need of a device's memory, before it is made: formulas, their error, and what is certain. Pure.

Corrected by what earlier launches said. Bytes of one device throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from sweep.failure import FailureKind
from sweep.memory.card import ModelCard
from sweep.memory.launches import KV_BYTES, LENGTH, SEQS, TOKENS, UTILIZATION
from sweep.memory.pool import parallel, pool_of, whole
from sweep.memory.shortage import Shortage
from sweep.model import DeviceMemory, Flags, ServerFacts
from sweep.text import percent

GIB = 2**30
_FREE: FailureKind = "oom_free_memory_lt_requested"
# vLLM 0.32's own defaults, where the caller does not know them: of a card with 70 GiB or more, and of others.
_UTILIZATION = 0.92
_LARGE_CARD = 70 * GIB
_CPU_BLOCK_TOKENS = 128
# What CUDA's libraries take while a model is loaded and profiled; with NCCL's buffers where devices talk.
_LIBRARIES, _TALKING = 0.2 * GIB, 0.5 * GIB
# A worker of the CPU backend beside its weights, as 0.32 logs it: Python, torch, vLLM; and what compiling adds.
_CPU_PROCESS, _CPU_COMPILED = 0.68 * GIB, 0.06 * GIB
# Between what is seen before a launch and what the server finds free lies its own CUDA context, of at least this size.
_CONTEXT = 0.3 * GIB
# One captured graph, for each layer; 67 graphs of 32 layers take about 0.5 GiB.
_GRAPH_LAYER = 0.25 * 2**20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a launch, in bytes of one device.

    requested_bytes, kv_bytes: None where the device's memory is not known. kv_bytes may be negative.
    error_bytes: the real KV cache is expected within this of kv_bytes. corrected: by launches that were seen.
    certain: why it cannot run whatever the estimate's error is. likely: why it will not, by more than its error.
    """

    weights_bytes: int
    weights_exact: bool
    activations_bytes: int
    graphs_bytes: int
    overhead_bytes: int
    requested_bytes: int | None
    kv_bytes: int | None
    kv_tokens: int | None
    max_concurrency: float | None
    request_bytes: int | None  # what one request of full length needs
    error_bytes: int
    corrected: bool
    certain: Shortage | None = None
    likely: Shortage | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure as it was expected, and as the log had it."""

    name: str
    unit: str  # "bytes" or "tokens"
    expected: float
    seen: float

    @property
    def error_frac(self) -> float | None:
        """How far the seen figure is above the expected one."""
        return self.seen / self.expected - 1 if self.expected > 0 else None

    @property
    def words(self) -> str:
        change = "" if self.error_frac is None else f" ({percent(self.error_frac, 0)})"
        if self.unit == "tokens":
            return f"{self.name} {self.expected:,.0f} expected, {self.seen:,.0f} seen{change}"
        return f"{self.name} {self.expected / GIB:.2f} GiB expected, {self.seen / GIB:.2f} seen{change}"


def compare(expected: Estimate, facts: ServerFacts) -> tuple[Comparison, ...]:
    """Return every figure that was both expected and seen."""
    pairs = (
        ("weights", "bytes", expected.weights_bytes, facts.weights_bytes),
        ("CUDA graphs", "bytes", expected.graphs_bytes, facts.graphs_bytes),
        ("KV cache", "bytes", expected.kv_bytes, facts.available_kv_bytes),
        ("KV tokens", "tokens", expected.kv_tokens, facts.kv_cache_tokens),
    )
    return tuple(
        Comparison(name, unit, wanted, seen)
        for name, unit, wanted, seen in pairs
        if wanted is not None and seen is not None
    )


def estimate(
    card: ModelCard,
    flags: Flags,
    memory: DeviceMemory | None,
    seen: Sequence[tuple[Flags, ServerFacts]] = (),
) -> Estimate:
    """Return what a launch with these flags will need and leave.

    flags: all of them, with what is known of vLLM's defaults filled in. memory: of the device before the launch.
    seen: flags and facts of launches on the same device, which correct the estimate.
    """
    parts = _parts(card, flags, memory)
    errors = [error for other, facts in seen if (error := _error(card, other, facts, memory)) is not None]
    correction = median(errors) if errors else 0.0
    outside = parts.outside + correction
    kv = _kv_bytes(flags, parts.requested, outside)
    pool = pool_of(card, flags, block_tokens=_CPU_BLOCK_TOKENS if _on_cpu(memory) else 16)
    length = _length(card, flags)
    tokens, concurrency, request = None, None, None
    if pool is not None and length is not None:
        request = pool.request_bytes(length, _in_flight(flags, memory))
        if kv is not None:
            tokens, concurrency = pool.capacity(int(kv), length, _in_flight(flags, memory))
    known = Estimate(
        weights_bytes=int(parts.weights),
        weights_exact=_exact(card, flags),
        activations_bytes=int(parts.activations),
        graphs_bytes=int(parts.graphs),
        overhead_bytes=int(parts.overhead + correction),
        requested_bytes=None if parts.requested is None else int(parts.requested),
        kv_bytes=None if kv is None else int(kv),
        kv_tokens=tokens,
        max_concurrency=concurrency,
        request_bytes=request,
        error_bytes=0 if flags.get(KV_BYTES) else int(_spread(card, parts, errors)),
        corrected=bool(errors),
    )
    certain = _certain(known, memory, flags)
    return replace(known, certain=certain, likely=None if certain else _likely(known, memory, flags))


@dataclass(frozen=True, slots=True)
class _Parts:
    weights: float
    activations: float
    graphs: float
    overhead: float
    requested: float | None

    @property
    def outside(self) -> float:
        """All that is not KV cache."""
        return self.weights + self.activations + self.graphs + self.overhead


def _parts(card: ModelCard, flags: Flags, memory: DeviceMemory | None) -> _Parts:
    requested = None if memory is None else _share(flags) * memory.total_bytes
    weights = _weights(card, flags)
    if _on_cpu(memory):
        # The backend takes the worker's resident memory as it is after one small run for warming up.
        process = _CPU_PROCESS + (0.0 if flags.get("enforce-eager") else _CPU_COMPILED)
        return _Parts(weights, 0.0, 0.0, process, requested)
    tensor, pipeline = parallel(flags)
    overhead = _LIBRARIES + (_TALKING if tensor * pipeline > 1 else 0.0)
    return _Parts(weights, _activations(card, flags, memory), _graphs(card, flags, memory), overhead, requested)


def _weights(card: ModelCard, flags: Flags) -> float:
    """Return the weights of the device that holds most: of a pipeline, the one with most layers."""
    tensor, pipeline = parallel(flags)
    layers = card.architecture.layer_count
    return card.loaded_bytes(flags.get("dtype")) / tensor * math.ceil(layers / pipeline) / layers


def _activations(card: ModelCard, flags: Flags, memory: DeviceMemory | None) -> float:
    """Return the peak of the profiling run: the largest batch in the widest layer, or all sequences' logits.

    tokens x bytes x (4 x hidden + 3 x MLP width / tensor parallel): the residual, the layer's input and output and the
    attention's, then gate, up and their product. sequences x vocabulary x 4 bytes x 3: logits as 32-bit floats, and the
    copies that sampling with top-p sorts.
    """
    shape, tensor = card.architecture, parallel(flags)[0]
    batch = _tokens(flags, memory) * card.dtype_bytes(flags.get("dtype"))
    forward = batch * (4 * shape.hidden + 3 * shape.intermediate / tensor)
    logits = _seqs(flags, memory) * shape.vocab * 4 * 3
    return max(forward, logits)


def _graphs(card: ModelCard, flags: Flags, memory: DeviceMemory | None) -> float:
    """Return what CUDA graphs take: of 1, 2, 4, every 8 to 256 and every 16 tokens to twice the sequences, or 512."""
    if flags.get("enforce-eager"):
        return 0.0
    largest = min(2 * _seqs(flags, memory), 512, _tokens(flags, memory))
    sizes = 3 + min(largest, 256) / 8 + max(0, largest - 256) / 16
    return sizes * card.architecture.layer_count / parallel(flags)[1] * _GRAPH_LAYER


def _error(card: ModelCard, flags: Flags, facts: ServerFacts, memory: DeviceMemory | None) -> float | None:
    """Return by how much a launch kept more from the KV cache than was expected of it."""
    parts = _parts(card, flags, memory)
    requested = parts.requested if facts.requested_bytes is None else facts.requested_bytes
    if requested is None or facts.available_kv_bytes is None or flags.get(KV_BYTES):
        return None
    return requested - facts.available_kv_bytes - parts.outside


def _spread(card: ModelCard, parts: _Parts, errors: Sequence[float]) -> float:
    """Return how far the KV cache may be from what is expected.

    Before any launch: half of the activations, graphs and overhead, and of the weights 2 %, or 10 % where they are
    computed for a family that is not known so well, or for a quantized checkpoint. After some: how far they disagree,
    and a fifth of the activations, since other sizes may be wrong by another amount.
    """
    if not errors:
        rough = card.weights_from == "architecture" and (card.quantization or not card.architecture.exact)
        return 0.5 * (parts.outside - parts.weights) + (0.1 if rough else 0.02) * parts.weights
    return max(errors) - min(errors) + 0.2 * parts.activations + 0.05 * GIB


def _kv_bytes(flags: Flags, requested: float | None, outside: float) -> float | None:
    if fixed := flags.get(KV_BYTES):
        return whole(fixed, 0)
    return None if requested is None else requested - outside


def _exact(card: ModelCard, flags: Flags) -> bool:
    """Tell whether the weights' size is certain: read from files, and loaded as they are."""
    changed = flags.get("quantization") or flags.get("cpu-offload-gb") or card.quantization
    return card.weights_from == "files" and not changed and card.elements is not None


def _certain(known: Estimate, memory: DeviceMemory | None, flags: Flags) -> Shortage | None:
    if memory is None or known.requested_bytes is None:
        return None
    if reason := _more_than_free(known, memory, flags):
        return reason
    if not known.weights_exact or parallel(flags) != (1, 1) or whole(flags.get("data-parallel-size"), 1) > 1:
        return None  # how experts and embeddings are divided among devices is not certain
    fixed = bool(flags.get(KV_BYTES))
    # Two per cent: some numbers are loaded in another type than they are stored in.
    weights = 0.98 * known.weights_bytes
    limit, limited = known.requested_bytes, f"{UTILIZATION} {_share(flags):g} gives"
    if fixed:
        limit, limited = memory.total_bytes, "the device has"
    if weights > limit:
        return Shortage("oom_weights", f"the weights take {_gib(weights)} GiB, and {limited} {_gib(limit)}")
    left = (known.kv_bytes or 0) if fixed else limit - weights
    if known.request_bytes is not None and known.request_bytes > left:
        words = (
            f"one request of full length needs {_gib(known.request_bytes)} GiB of KV cache, and beside the weights "
            f"there is no room for more than {_gib(left)}"
        )
        return Shortage("oom_kv_cache_too_small", words)
    return None


def _more_than_free(known: Estimate, memory: DeviceMemory, flags: Flags) -> Shortage | None:
    fixed = bool(flags.get(KV_BYTES))
    free, all_of_it = _gib(memory.free_bytes), _gib(memory.total_bytes)
    if fixed and (known.kv_bytes or 0) > memory.free_bytes:
        words = f"{KV_BYTES} asks for {_gib(known.kv_bytes or 0)} GiB, and {free} of {all_of_it} are free"
        return Shortage(_FREE, words)
    # With a cache of its own size the CPU backend does not look at the share.
    if not (fixed and _on_cpu(memory)) and _least_wanted(known, memory) > memory.free_bytes:
        wanted = _gib(known.requested_bytes or 0)
        words = f"{UTILIZATION} {_share(flags):g} asks for {wanted} GiB, and {free} of {all_of_it} are free"
        return Shortage(_FREE, words)
    return None


def _likely(known: Estimate, memory: DeviceMemory | None, flags: Flags) -> Shortage | None:
    if memory is None or known.kv_bytes is None or known.requested_bytes is None:
        return None
    if not _on_cpu(memory) and _least_wanted(known, memory) > memory.free_bytes - _CONTEXT:
        words = (
            f"{UTILIZATION} {_share(flags):g} asks for {_gib(known.requested_bytes)} GiB, and about "
            f"{_gib(memory.free_bytes - _CONTEXT)} will be free when the server has started"
        )
        return Shortage(_FREE, words)
    need, most = known.request_bytes or 0, known.kv_bytes + known.error_bytes
    if most < need or most <= 0:
        words = (
            f"about {_gib(known.kv_bytes)} GiB are left for the KV cache, give or take {_gib(known.error_bytes)}; one "
            f"request of full length needs {_gib(need)}"
        )
        return Shortage("oom_kv_cache_none" if most <= 0 else "oom_kv_cache_too_small", words)
    return None


def _least_wanted(known: Estimate, memory: DeviceMemory) -> float:
    """Return the least that the share may come to: a driver counts a little more as all than a program is told."""
    return (known.requested_bytes or 0) * (1.0 if _on_cpu(memory) else 0.99)


def _share(flags: Flags) -> float:
    value = flags.get(UTILIZATION)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _UTILIZATION


def _tokens(flags: Flags, memory: DeviceMemory | None) -> int:
    return whole(flags.get(TOKENS), 8192 if _large(memory) else 2048)


def _seqs(flags: Flags, memory: DeviceMemory | None) -> int:
    return whole(flags.get(SEQS), 128 if _on_cpu(memory) else 1024 if _large(memory) else 256)


def _in_flight(flags: Flags, memory: DeviceMemory | None) -> int:
    """Return the tokens that may be scheduled and not settled yet: with asynchronous scheduling, one batch more."""
    pipeline = parallel(flags)[1]
    return (pipeline + (flags.get("async-scheduling") is not False)) * _tokens(flags, memory)


def _length(card: ModelCard, flags: Flags) -> int | None:
    length = whole(flags.get(LENGTH), 0)
    return length or card.architecture.max_len_tokens


def _large(memory: DeviceMemory | None) -> bool:
    return memory is not None and memory.total_bytes >= _LARGE_CARD


def _on_cpu(memory: DeviceMemory | None) -> bool:
    return memory is not None and memory.source == "numa"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
