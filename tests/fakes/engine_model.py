"""The fake engine: what fits into its memory, and how long its steps take.

The scheduler is vLLM's in small: continuous batching within max-num-seqs, max-num-batched-tokens and the KV cache,
chunked prefill, prefix caching by blocks, preemption by recomputation. Only the duration of a step is made up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GIB = 2**30
KV_BYTES_PER_TOKEN = 128 * 1024
LONGEST_MODEL_LEN = 32768
VOCABULARY = 32000


class StartError(Exception):
    """The engine cannot start; `chain` is its log, the last line the decisive one."""

    def __init__(self, *chain: str) -> None:
        super().__init__(chain[-1])
        self.chain = chain


@dataclass(frozen=True)
class Card:
    total_gib: float
    free_gib: float
    weights_gib: float  # on each card

    @staticmethod
    def from_env(env: Mapping[str, str], cards: int) -> Card:
        total = float(env.get("FAKE_VLLM_TOTAL_GIB", "80"))
        free = total * float(env.get("FAKE_VLLM_FREE_FRAC", "0.99"))
        return Card(total, free, float(env.get("FAKE_VLLM_WEIGHTS_GIB", "16")) / cards)


@dataclass(frozen=True)
class Limits:
    """The flags that the model knows, with vLLM's defaults filled in."""

    model: str
    max_model_len: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefix_caching: bool
    chunked_prefill: bool
    enforce_eager: bool
    performance_mode: str
    cards: int

    @staticmethod
    def resolve(args: Any, card: Card) -> Limits:
        large = card.total_gib >= 70
        factor = 2 if args.performance_mode == "throughput" else 1

        def given(name: str, default: Any) -> Any:
            value = getattr(args, name)
            return default if value is None else value

        seqs = given("max_num_seqs", (1024 if large else 256) * factor)
        return Limits(
            model=args.model,
            max_model_len=given("max_model_len", LONGEST_MODEL_LEN),
            gpu_memory_utilization=given("gpu_memory_utilization", 0.92),
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            max_num_seqs=seqs,
            max_num_batched_tokens=given("max_num_batched_tokens", (8192 if large else 2048) * factor),
            block_size=given("block_size", 16),
            prefix_caching=given("enable_prefix_caching", True),
            chunked_prefill=given("enable_chunked_prefill", True),
            enforce_eager=bool(args.enforce_eager),
            performance_mode=given("performance_mode", "balanced"),
            cards=args.tensor_parallel_size or 1,
        )


def check_config(limits: Limits) -> str | None:
    """What vLLM's configuration classes refuse, in pydantic's words."""
    seqs, batched, length = limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len
    checks = (
        (seqs < 1, "SchedulerConfig", f"max_num_seqs ({seqs}) must be at least 1."),
        (
            batched < seqs,
            "SchedulerConfig",
            f"max_num_batched_tokens ({batched}) must be greater than or equal to max_num_seqs ({seqs}).",
        ),
        (
            batched < length and not limits.chunked_prefill,
            "SchedulerConfig",
            f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({length}). Please increase the former.",
        ),
        (
            length > LONGEST_MODEL_LEN,
            "ModelConfig",
            (
                f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
                f"(max_position_embeddings={LONGEST_MODEL_LEN}.0 or model_max_length=None in model's config.json)."
            ),
        ),
        (limits.block_size < 1, "CacheConfig", f"block_size ({limits.block_size}) must be greater than 0."),
        (
            not 0 < limits.gpu_memory_utilization <= 1,
            "CacheConfig",
            f"GPU memory utilization must be in (0, 1]. Got {limits.gpu_memory_utilization}.",
        ),
    )
    for wrong, where, message in checks:
        if wrong:
            return (
                f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {where}\n"
                f"  Value error, {message} [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]"
            )
    return None


@dataclass(frozen=True)
class Memory:
    kv_gib: float
    blocks: int
    spare_gib: float  # free, and not reserved by the utilization

    def check_kv(self, limits: Limits) -> None:
        where = '  File "/srv/venv/lib/python3.11/site-packages/vllm/v1/core/kv_cache_utils.py", line 1030, in _check'
        if self.blocks <= 0:
            raise StartError(
                where,
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite "
                "its name). See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            )
        if self.blocks * limits.block_size < limits.max_model_len:
            need = limits.max_model_len * KV_BYTES_PER_TOKEN / limits.cards / GIB
            raise StartError(
                where,
                f"ValueError: To serve at least one request with the model's max seq len ({limits.max_model_len}), "
                f"({need:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
                f"({self.kv_gib:.2f} GiB). Based on the available memory, the estimated maximum model length is "
                f"{self.blocks * limits.block_size}. Try increasing `gpu_memory_utilization` (which also controls CPU "
                "memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. See "
                "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            )

    def check_sampler(self, limits: Limits) -> None:
        """Logits of one step in float32, three times over, must fit beside what is reserved."""
        need = 3 * 4 * limits.max_num_seqs * 151_936 / GIB
        if need > self.spare_gib:
            raise StartError(
                f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {need / 3:.2f} GiB. GPU 0 has a total "
                f"capacity of 79.11 GiB of which {max(self.spare_gib, 0):.2f} GiB is free.",
                "The above exception was the direct cause of the following exception:",
                f"RuntimeError: CUDA out of memory occurred when warming up sampler with {limits.max_num_seqs} "
                "dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the "
                "engine.",
            )


def plan_memory(limits: Limits, card: Card) -> Memory:
    utilization = limits.gpu_memory_utilization
    wanted = utilization * card.total_gib
    if card.weights_gib > card.free_gib:
        raise StartError(
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory "
            "for weights, increasing --tensor-parallel-size, or using --quantization. (original error: CUDA OOM)",
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 0.50 GiB. GPU 0 has a total capacity of "
            f"{card.total_gib:.2f} GiB of which 0.02 GiB is free.",
        )
    if wanted > card.free_gib:
        raise StartError(
            '  File "/srv/venv/lib/python3.11/site-packages/vllm/v1/worker/utils.py", line 762, in request_memory',
            f"ValueError: Free memory on device cuda:0 ({card.free_gib:.2f}/{card.total_gib:.2f} GiB) on startup is "
            f"less than desired GPU memory utilization ({utilization}, {wanted:.2f} GiB). Decrease GPU memory "
            "utilization or reduce GPU memory used by other processes.",
        )
    activations = 0.5 + limits.max_num_batched_tokens * 0.25 / 1024
    kv_gib = wanted - card.weights_gib - activations
    if limits.kv_cache_memory_bytes is not None:
        kv_gib = limits.kv_cache_memory_bytes / GIB
    blocks = int(kv_gib * GIB * limits.cards // (KV_BYTES_PER_TOKEN * limits.block_size))
    return Memory(kv_gib, blocks, card.free_gib - wanted)


@dataclass(eq=False)
class Sequence:
    """One request in the engine. Times are of `time.perf_counter`; tokens come out of `out`, None at the end."""

    prompt: list[Any]
    salt: str
    max_tokens: int
    arrived: float
    out: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    computed: int = 0  # tokens whose KV is in the cache
    made: int = 0
    answer: list[int] = field(default_factory=list)
    told: int = 0  # tokens that a stream has carried so far
    scheduled: float | None = None
    first_token: float | None = None
    preempted: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + self.made

    @property
    def prefilling(self) -> bool:
        return self.computed < self.length - (1 if self.made else 0)


class Engine:
    """Steps until cancelled. `on_finish` and `on_step` report to the metrics."""

    def __init__(
        self, limits: Limits, blocks: int, speed: float, drift_s: float, on_event: Callable[..., None]
    ) -> None:
        self.limits, self.speed, self.drift_s, self.on_event = limits, speed, drift_s, on_event
        self.capacity = blocks * limits.block_size
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.cached: OrderedDict[int, None] = OrderedDict()  # hashes of the blocks whose KV is kept
        self.wake = asyncio.Event()
        self.hung = False
        self.first_work: float | None = None

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.wake.set()

    def drop(self, sequence: Sequence) -> None:
        """The client went away."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def used_tokens(self) -> int:
        return sum(s.length for s in self.running)

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            if self.hung or not (self.running or self.waiting):
                self.wake.clear()
                await self.wake.wait()
                due = time.perf_counter()
                self.first_work = self.first_work or due
                continue
            decodes, prefills = self.schedule()
            due = max(due, time.perf_counter() - 0.5) + self.step_s(len(decodes), sum(prefills.values())) / self.speed
            await asyncio.sleep(due - time.perf_counter())
            self.finish_step(decodes, prefills)

    def step_s(self, decodes: int, prefill_tokens: int) -> float:
        """A constant for each step, a share for each sequence, a share for each prompt token."""
        limits = self.limits
        fixed = 0.012 * (1.6 if limits.enforce_eager else 1.0)
        fixed *= {"interactivity": 0.9, "throughput": 1.1}.get(limits.performance_mode, 1.0)
        each = 0.00015 * {"interactivity": 1.1, "throughput": 0.9}.get(limits.performance_mode, 1.0)
        each *= 1 + 0.002 * abs(limits.block_size - 32)
        duration = fixed + (each * decodes + 30e-6 * prefill_tokens) / limits.cards**0.8
        if self.drift_s and self.first_work is not None:
            age = (time.perf_counter() - self.first_work) / self.drift_s
            duration *= 1 + max(0.0, 1 - age)
        return duration

    def schedule(self) -> tuple[list[Sequence], dict[Sequence, int]]:
        """Choose what the next step computes: one token for each decode, and prompt tokens within the budget."""
        self.make_room()
        decodes = [s for s in self.running if not s.prefilling]
        budget = self.limits.max_num_batched_tokens - len(decodes)
        prefills: dict[Sequence, int] = {}
        for sequence in [s for s in self.running if s.prefilling]:
            budget -= self.take_prefill(sequence, budget, prefills)
        now = time.perf_counter()
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            whole = self.limits.chunked_prefill or sequence.length <= budget
            if not whole or self.used_tokens + sequence.length + 1 > self.capacity:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            if sequence.scheduled is None:
                sequence.scheduled = now
                sequence.computed = self.look_up_prefix(sequence)
            budget -= self.take_prefill(sequence, budget, prefills)
        if prefills and not self.limits.chunked_prefill:
            decodes = []  # a step holds either prompts or decodes
        return decodes, prefills

    @staticmethod
    def take_prefill(sequence: Sequence, budget: int, prefills: dict[Sequence, int]) -> int:
        tokens = min(sequence.length - sequence.computed, budget)
        if tokens > 0:
            prefills[sequence] = tokens
        return max(tokens, 0)

    def make_room(self) -> None:
        while len(self.running) > 1 and self.used_tokens + len(self.running) > self.capacity:
            victim = self.running.pop()
            victim.computed = 0
            victim.preempted += 1
            self.waiting.appendleft(victim)
            self.on_event("preempted", victim)

    def block_hashes(self, sequence: Sequence) -> list[int]:
        size, key, hashes = self.limits.block_size, hash(sequence.salt), []
        tokens = sequence.prompt + sequence.answer[:-1]  # nothing has been computed from the last token
        for start in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[start : start + size]))
            hashes.append(key)
        return hashes

    def look_up_prefix(self, sequence: Sequence) -> int:
        """Number of prompt tokens that need no computing; at least one token always does."""
        if not self.limits.prefix_caching:
            return 0
        hits = 0
        for key in self.block_hashes(sequence):
            if key not in self.cached:
                break
            self.cached.move_to_end(key)
            hits += self.limits.block_size
        if hits == len(sequence.prompt):
            hits -= self.limits.block_size
        self.on_event("prefix", sequence, len(sequence.prompt), hits)
        return hits

    def keep_prefix(self, sequence: Sequence) -> None:
        if self.limits.prefix_caching:
            self.cached.update(dict.fromkeys(self.block_hashes(sequence)))
            while len(self.cached) * self.limits.block_size > self.capacity:
                self.cached.popitem(last=False)

    def finish_step(self, decodes: list[Sequence], prefills: dict[Sequence, int]) -> None:
        now = time.perf_counter()
        for sequence, tokens in prefills.items():
            sequence.computed += tokens
        alive = set(self.running)
        ready = [s for s in (*decodes, *prefills) if s in alive and not s.prefilling]
        for sequence in ready:
            self.emit(sequence, now)

    def emit(self, sequence: Sequence, now: float) -> None:
        if not sequence.made:
            sequence.first_token = now
            self.keep_prefix(sequence)
            self.on_event("first_token", sequence)
        sequence.made += 1
        sequence.computed = sequence.length - 1
        last = sequence.made >= sequence.max_tokens
        self.on_event("token", sequence)
        sequence.answer.append(1000 + (sequence.made * 7 + len(sequence.prompt)) % (VOCABULARY - 1000))
        sequence.out.put_nowait((sequence.answer[-1], last))
        if last:
            self.keep_prefix(sequence)
            self.running.remove(sequence)
            self.on_event("finished", sequence)

    def fail(self, message: str) -> None:
        """The engine is gone: every request learns of it."""
        self.hung = True
        for sequence in (*self.running, *self.waiting):
            sequence.out.put_nowait(message)
        self.running.clear()
        self.waiting.clear()
