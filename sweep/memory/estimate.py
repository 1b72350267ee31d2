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
from sweep.memory.launches import KV_BYTES, LENGTH, SEQS, TOKENS, UTILIZATION, point_of, seen_total
from sweep.memory.plain_flags import unusual_flags
from sweep.memory.pool import PIPELINE, TENSOR, pool_of
from sweep.memory.shortage import Shortage
from sweep.memory.sizes import flag_size, number_of, size_of
from sweep.model import DeviceMemory, Flags, ServerFacts
from sweep.text import percent

GIB = 2**30
_FREE: FailureKind = "oom_free_memory_lt_requested"
# vLLM 0.32's own defaults, where the caller does not know them: of a card with 70 GiB or more, and of others.
_UTILIZATION = 0.92
_SAME_DEVICE = 0.05  # of the whole: a launch that saw another total was on another device
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
    unusual: flags that may change all this by an amount that is not known; nothing is certain or likely then but what
    does not rest on the model. certain: why it cannot run whatever the estimate's error is. likely: why it will not, by
    more than its error.
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
    unusual: tuple[str, ...] = ()
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
    if seen_total(memory) is None:
        memory = None
    parts = _parts(card, flags, memory)
    alike = [(other, facts) for other, facts in seen if point_of(other, {}).others == point_of(flags, {}).others]
    errors = [error for other, facts in alike if (error := _error(card, other, facts, memory)) is not None]
    correction = median(errors) if errors else 0.0
    outside = parts.outside + correction
    kv = _kv_bytes(flags, parts.requested, outside)
    pool = pool_of(card, flags, block_tokens=_CPU_BLOCK_TOKENS if _on_cpu(memory) else 16)
    length = _length(card, flags)
    tokens, concurrency, request, least = None, None, None, None
    if pool is not None and length is not None:
        request = pool.request_bytes(length, _in_flight(flags, memory))
        least = pool.request_bytes(length, flag_size(flags, TOKENS, 0) or 0)
        if kv is not None:
            tokens, concurrency = pool.capacity(int(kv), length, _in_flight(flags, memory))
    known = Estimate(
        weights_bytes=int(parts.weights),
        weights_exact=card.weights_from == "files" and card.elements is not None and card.quantization is None,
        activations_bytes=int(parts.activations),
        graphs_bytes=int(parts.graphs),
        overhead_bytes=int(parts.overhead + correction),
        requested_bytes=None if parts.requested is None else int(parts.requested),
        kv_bytes=None if kv is None else int(kv),
        kv_tokens=tokens,
        max_concurrency=concurrency,
        request_bytes=request,
        error_bytes=0 if _cache_is_set(flags) else int(_spread(card, parts, errors, flags)),
        corrected=bool(errors),
        unusual=_unusual(card, flags),
    )
    most = _most_left(card, flags, known, parts, errors)
    certain = _certain(card, known, memory, flags, least)
    likely = None if certain else _likely(known, memory, flags, most, least)
    return replace(known, certain=certain, likely=likely)


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
    share = _share(flags)
    requested = None if memory is None or share is None else share * memory.total_bytes
    weights = _weights(card, flags)
    if _on_cpu(memory):
        # The backend takes the worker's resident memory as it is after one small run for warming up.
        process = _CPU_PROCESS + (0.0 if flags.get("enforce-eager") else _CPU_COMPILED)
        return _Parts(weights, 0.0, 0.0, process, requested)
    tensor, pipeline = _parallel(flags)
    overhead = _LIBRARIES + (_TALKING if tensor * pipeline > 1 else 0.0)
    return _Parts(weights, _activations(card, flags, memory), _graphs(card, flags, memory), overhead, requested)


def _weights(card: ModelCard, flags: Flags) -> float:
    """Return the weights of the device that holds most: of a pipeline, the one with most layers."""
    tensor, pipeline = _parallel(flags)
    layers = card.architecture.layer_count
    return card.loaded_bytes(flags.get("dtype")) / tensor * math.ceil(layers / pipeline) / layers


def _activations(card: ModelCard, flags: Flags, memory: DeviceMemory | None) -> float:
    """Return the peak of the profiling run: the largest batch in the widest layer, or all sequences' logits.

    tokens x bytes x (4 x hidden + 3 x MLP width / tensor parallel): the residual, the layer's input and output and the
    attention's, then gate, up and their product. sequences x vocabulary x 4 bytes x 3: logits as 32-bit floats, and the
    copies that sampling with top-p sorts.
    """
    shape, tensor = card.architecture, _parallel(flags)[0]
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
    return sizes * card.architecture.layer_count / _parallel(flags)[1] * _GRAPH_LAYER


def _error(card: ModelCard, flags: Flags, facts: ServerFacts, memory: DeviceMemory | None) -> float | None:
    """Return by how much a launch kept more from the KV cache than was expected of it."""
    parts = _parts(card, flags, memory)
    requested = parts.requested if facts.requested_bytes is None else number_of(facts.requested_bytes)
    available = number_of(facts.available_kv_bytes)
    if requested is None or available is None or _cache_is_set(flags) or not _same_device(flags, facts, memory):
        return None
    return requested - available - parts.outside


def _same_device(flags: Flags, facts: ServerFacts, memory: DeviceMemory | None) -> bool:
    total, share = number_of(facts.total_bytes), _share(flags)
    if total is None and facts.requested_bytes is not None and share:
        total = (number_of(facts.requested_bytes) or 0.0) / share
    return memory is None or total is None or abs(total / memory.total_bytes - 1) <= _SAME_DEVICE


def _spread(card: ModelCard, parts: _Parts, errors: Sequence[float], flags: Flags) -> float:
    """Return how far the KV cache may be from what is expected.

    Before any launch: half of the activations, graphs and overhead, and of the weights 2 %, or 10 % where they are
    computed for a family that is not known so well, for a quantized checkpoint or for stages of layers; and what the
    files hold beyond the sizes in the config, since not all of it need be loaded. After some: how far they disagree,
    and a fifth of the activations, since other sizes may be wrong by another amount.
    """
    if errors:
        return max(errors) - min(errors) + 0.2 * parts.activations + 0.05 * GIB
    computed = card.weights_from == "architecture" and not card.architecture.exact
    rough = computed or card.quantization is not None or _parallel(flags)[1] > 1
    beyond = 1 - card.least_bytes(flags.get("dtype")) / max(1, card.loaded_bytes(flags.get("dtype")))
    return 0.5 * (parts.outside - parts.weights) + ((0.1 if rough else 0.02) + beyond) * parts.weights


def _kv_bytes(flags: Flags, requested: float | None, outside: float) -> float | None:
    if _cache_is_set(flags):
        return size_of(flags[KV_BYTES])
    return None if requested is None else requested - outside


def _cache_is_set(flags: Flags) -> bool:
    return flags.get(KV_BYTES) not in (None, False, 0, "0")


def _unusual(card: ModelCard, flags: Flags) -> tuple[str, ...]:
    """Return the flags beside which the formulas say nothing: unknown ones, and sizes that cannot be read."""
    unread = [name for name in (TOKENS, SEQS, TENSOR, PIPELINE) if flag_size(flags, name, 1) is None]
    return (*unusual_flags(flags, card.quantization), *unread)


def _certain(
    card: ModelCard, known: Estimate, memory: DeviceMemory | None, flags: Flags, least: int | None
) -> Shortage | None:
    """Return what cannot be otherwise. least: bytes of the cache that one request of full length needs."""
    if memory is None or known.requested_bytes is None:
        return None
    if reason := _more_than_free(known, memory, flags):
        return reason
    # How experts and embeddings are divided among devices is not certain.
    sure = known.weights_exact and card.architecture.exact and not known.unusual and _parallel(flags) == (1, 1)
    fixed = _cache_is_set(flags)
    if not sure or (fixed and known.kv_bytes is None):
        return None
    # Two per cent: some numbers are loaded in another type than they are stored in.
    weights = 0.98 * card.least_bytes(flags.get("dtype"))
    limit, limited = known.requested_bytes, f"{UTILIZATION} {_share(flags):g} gives"
    if fixed:
        limit, limited = memory.total_bytes, "the device has"
    if weights > limit:
        return Shortage("oom_weights", f"the weights take {_gib(weights)} GiB, and {limited} {_gib(limit)}")
    left = (known.kv_bytes or 0) if fixed else limit - weights
    if least is not None and least > left:
        words = (
            f"one request of full length needs {_gib(least)} GiB of KV cache, and beside the weights there is no room "
            f"for more than {_gib(left)}"
        )
        return Shortage("oom_kv_cache_too_small", words)
    return None


def _more_than_free(known: Estimate, memory: DeviceMemory, flags: Flags) -> Shortage | None:
    fixed = _cache_is_set(flags)
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


def _most_left(card: ModelCard, flags: Flags, known: Estimate, parts: _Parts, errors: Sequence[float]) -> float | None:
    """Return how much may be left for the KV cache at most, in bytes; None where that rests on too little."""
    # Of a family that is not known so well, or of numbers of unknown size, what was computed is a rough figure.
    counted = card.weights_from == "files" or (card.architecture.exact and card.quantization is None)
    if not counted or known.unusual or known.kv_bytes is None or parts.requested is None:
        return None
    if _cache_is_set(flags):
        return known.kv_bytes
    left = parts.requested - parts.outside
    most = left - min(errors, default=0.0) + known.error_bytes
    # One launch may have met with another process's growth: where it alone says so, the formula has to agree.
    return max(most, left + _spread(card, parts, (), flags)) if len(errors) == 1 else most


def _likely(
    known: Estimate, memory: DeviceMemory | None, flags: Flags, most: float | None, least: int | None
) -> Shortage | None:
    """Return what will most probably be short. most: bytes that may be left for the cache. least: as for certain."""
    if memory is None or known.requested_bytes is None:
        return None
    if not _on_cpu(memory) and _least_wanted(known, memory) > memory.free_bytes - _CONTEXT:
        words = (
            f"{UTILIZATION} {_share(flags):g} asks for {_gib(known.requested_bytes)} GiB, and about "
            f"{_gib(memory.free_bytes - _CONTEXT)} will be free when the server has started"
        )
        return Shortage(_FREE, words)
    need = least or 0
    if most is None or known.kv_bytes is None or (most >= need and most > 0):
        return None
    words = (
        f"about {_gib(known.kv_bytes)} GiB are left for the KV cache, give or take {_gib(known.error_bytes)}; one "
        f"request of full length needs {_gib(need)}"
    )
    return Shortage("oom_kv_cache_none" if most <= 0 else "oom_kv_cache_too_small", words)


def _least_wanted(known: Estimate, memory: DeviceMemory) -> float:
    """Return the least that the share may come to: a driver counts a little more as all than a program is told."""
    return (known.requested_bytes or 0) * (1.0 if _on_cpu(memory) else 0.99)


def _share(flags: Flags) -> float | None:
    """Return the share of the memory that the server takes; None where what is set cannot be read."""
    value = flags.get(UTILIZATION)
    return _UTILIZATION if value is None else number_of(value)


def _parallel(flags: Flags) -> tuple[int, int]:
    return flag_size(flags, TENSOR, 1) or 1, flag_size(flags, PIPELINE, 1) or 1


def _tokens(flags: Flags, memory: DeviceMemory | None) -> int:
    default = 8192 if _large(memory) else 2048
    return flag_size(flags, TOKENS, default) or default


def _seqs(flags: Flags, memory: DeviceMemory | None) -> int:
    default = 128 if _on_cpu(memory) else 1024 if _large(memory) else 256
    return flag_size(flags, SEQS, default) or default


def _in_flight(flags: Flags, memory: DeviceMemory | None) -> int:
    """Return the tokens that may be scheduled and not settled yet: with asynchronous scheduling, one batch more."""
    pipeline = _parallel(flags)[1]
    return (pipeline + (flags.get("async-scheduling") is not False)) * _tokens(flags, memory)


def _length(card: ModelCard, flags: Flags) -> int | None:
    """Return the longest request; None where vLLM chooses it, by what fits, or by what is not known here."""
    most = card.architecture.max_len_tokens
    if flags.get(LENGTH) is None:
        return None if flags.get("disable-sliding-window") else most
    return size_of(flags[LENGTH])


def _large(memory: DeviceMemory | None) -> bool:
    return memory is not None and memory.total_bytes >= _LARGE_CARD


def _on_cpu(memory: DeviceMemory | None) -> bool:
    return memory is not None and memory.source == "numa"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
