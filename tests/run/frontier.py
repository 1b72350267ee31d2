"""A machine that does not exist, with the memory of one that could: where its frontier lies, and how it says so.

A configuration fails in the order and in the words in which vLLM's start goes; the log of a start is read by the same
rules as a real one. About 17 % of the space cannot run: too little utilization for any KV cache, more than is free,
too many tokens for the profiling run, too many sequences beside a large cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sweep.config import SweepConfig
from sweep.model import DeviceMemory, Flags, Job, Measured, ServerFacts
from sweep.serve import vllm_log
from sweep.serve.failures import classify

from .studies import complete, config, search, sweep_of

GIB = 2**30
TOTAL_GIB, FREE_GIB = 79.11, 75.6
WEIGHTS_GIB = 35.0
MODEL_LEN = 8192
KV_GIB_PER_TOKEN = 320 / 2**20  # 320 KiB
DEFAULTS: Flags = {"gpu-memory-utilization": 0.9, "max-num-seqs": 256, "max-num-batched-tokens": 8192}


def space(**changes: object) -> SweepConfig:
    """Return a study of 40 trials over 19 x 8 x 6 x 3 x 2 points."""
    params = {
        "gpu-memory-utilization": {"low": 0.61, "high": 0.97, "step": 0.02},
        "max-num-seqs": {"low": 16, "high": 2048, "step": "pow2"},
        "max-num-batched-tokens": {"low": 1024, "high": 32768, "step": "pow2"},
        "block-size": [16, 32, 64],
        "enable-prefix-caching": [True, False],
    }
    told: dict[str, object] = {
        "serve__args": {"max-model-len": MODEL_LEN},
        "search__params": params,
        "search__sampler": "tpe",
        "run__trials": 40,
        "run__max_failures_in_a_row": 40,
    }
    return config(**{**told, **changes})


@dataclass
class Gpu:
    """The made-up machine. launches: the flags of every launch and what became of it."""

    seed: int = 0
    defaults: Flags = field(default_factory=lambda: dict(DEFAULTS))
    launches: list[tuple[Flags, str]] = field(default_factory=list)

    def see(self, devices: int = 1) -> DeviceMemory:
        return DeviceMemory(int(TOTAL_GIB * GIB), int((FREE_GIB + 0.45) * GIB), "nvml")  # before CUDA's own context

    async def run_job(self, job: Job, _say: Callable[[str], None]) -> Measured:
        await asyncio.sleep(0)
        flags = {**DEFAULTS, **job.launch.flags}
        lines = start_log(flags)
        log = Path(job.launch.trial_dir) / "server.log"
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        failed = fails(flags)
        told = classify(log, exit_code=1 if failed else None, phase="start", swept=job.launch.swept)
        facts = ServerFacts(**vllm_log.facts(log.read_text())._asdict())
        self.launches.append((job.launch.flags, told.kind if failed else "complete"))
        if failed:
            return Measured("infeasible", failure=told, server=facts, memory=self.see())
        noise = float(np.random.default_rng([self.seed, job.trial]).normal(1, 0.02))
        return replace(complete(noise * speed(flags)), server=facts, memory=self.see())


@dataclass(frozen=True)
class Study:
    """What became of a study of 40 trials. best: the speed of the best trial, as measured."""

    launched: list[Flags]
    out_of_memory: int
    skipped: list[Flags]
    best: float

    @property
    def skipped_wrongly(self) -> list[Flags]:
        return [flags for flags in self.skipped if not fails({**DEFAULTS, **flags})]


def study(root: Path, sampler: str, seed: int, *, skip: bool = True) -> Study:
    root.mkdir(parents=True, exist_ok=True)
    gpu = Gpu(seed)
    told = space(search__sampler=sampler, search__seed=seed, memory__skip=skip)
    sweep = sweep_of(told, root, gpu)
    search(sweep)
    assert sweep.ledger.best is not None
    return Study(
        launched=[flags for flags, _ in gpu.launches],
        out_of_memory=sum(kind.startswith("oom_") for _, kind in gpu.launches),
        skipped=[outcome.flags for outcome in sweep.ledger.outcomes if outcome.state == "skipped"],
        best=sweep.ledger.verdicts[sweep.ledger.best.trial].value or 0.0,
    )


def fails(flags: Flags) -> bool:
    return start_log(flags)[-1].startswith("RuntimeError: Engine core initialization failed")


def start_log(flags: Flags) -> list[str]:
    """Return what the server would log: to the end of its start, or to the failure that ends it."""
    utilization = float(flags["gpu-memory-utilization"])  # type: ignore[arg-type]
    seqs, tokens = int(flags["max-num-seqs"]), int(flags["max-num-batched-tokens"])  # type: ignore[call-overload]
    wanted = utilization * TOTAL_GIB
    activations = 0.6 + tokens * 0.7 / 1024 + seqs * 0.5 / 1024
    graphs = 0.3 + seqs * 0.5 / 1024
    lines = [core("INFO", "core.py:112", "Initializing a V1 LLM engine (v0.32.0) with config: model='some/model'")]
    if wanted > FREE_GIB:
        return [
            *lines,
            *died(
                f"ValueError: Free memory on device cuda:0 ({FREE_GIB:.2f}/{TOTAL_GIB:.2f} GiB) on startup is less "
                f"than desired GPU memory utilization ({utilization}, {wanted:.2f} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes.",
                where="request_memory",
            ),
        ]
    lines.append(
        core("INFO", "gpu_model_runner.py:5160", f"Model loading took {WEIGHTS_GIB:.2f} GiB memory and 9.81 s")
    )
    if WEIGHTS_GIB + activations > FREE_GIB:
        return [*lines, *died(out_of_memory(tokens * 0.3 / 1024), where="determine_available_memory")]
    available = wanted - WEIGHTS_GIB - activations
    lines.append(core("INFO", "gpu_worker.py:759", f"Available KV cache memory: {available:.2f} GiB"))
    if available <= 0:
        return [
            *lines,
            *died(
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite "
                "its name).",
                where="_check_enough_kv_cache_memory",
            ),
        ]
    fitting = int(available / KV_GIB_PER_TOKEN)
    if fitting < MODEL_LEN:
        need = MODEL_LEN * KV_GIB_PER_TOKEN
        return [
            *lines,
            *died(
                f"ValueError: To serve at least one request with the model's max seq len ({MODEL_LEN}), ({need:.2f} "
                f"GiB KV cache is needed, which is larger than the available KV cache memory ({available:.2f} GiB). "
                f"Based on the available memory, the estimated maximum model length is {fitting}. Try increasing "
                "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
                "`max_model_len` when initializing the engine.",
                where="_check_enough_kv_cache_memory",
            ),
        ]
    lines.append(
        core(
            "INFO",
            "kv_cache_utils.py:2327",
            f"GPU KV cache size: {fitting:,} tokens, Maximum concurrency for {MODEL_LEN:,} tokens per request: "
            f"{fitting / MODEL_LEN:.2f}x",
        )
    )
    spare = FREE_GIB - wanted
    if graphs > spare + 0.3:  # what profiling took is free again, though in pieces
        return [*lines, *died(out_of_memory(0.25), where="compile_or_warm_up_model")]
    if graphs + seqs * 1.2 / 1024 > spare + 0.5:
        return [
            *lines,
            *died(
                f"RuntimeError: CUDA out of memory occurred when warming up sampler with {seqs} dummy requests. Please "
                "try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
                where="compile_or_warm_up_model",
            ),
        ]
    lines.append(core("INFO", "gpu_model_runner.py:6243", f"Graph capturing finished in 2 secs, took {graphs:.2f} GiB"))
    lines.append(
        core(
            "INFO",
            "gpu_worker.py:1034",
            f"Free memory on device ({FREE_GIB:.2f}/{TOTAL_GIB:.2f} GiB) on startup. Desired GPU memory utilization is "
            f"({utilization}, {wanted:.2f} GiB). Actual usage is {WEIGHTS_GIB:.2f} GiB for weight.",
        )
    )
    return [*lines, "INFO:     Application startup complete."]


def speed(flags: Flags) -> float:
    """Tokens a second: the larger the cache and the batch the better, so that the best points lie near the frontier."""
    seqs, tokens = int(flags["max-num-seqs"]), int(flags["max-num-batched-tokens"])  # type: ignore[call-overload]
    available = float(flags["gpu-memory-utilization"]) * TOTAL_GIB - WEIGHTS_GIB - 0.6 - tokens * 0.7 / 1024  # type: ignore[arg-type]
    running = min(seqs, max(available, 0.0) / KV_GIB_PER_TOKEN / 1500)
    prefill = 1 - 0.04 * abs(np.log2(tokens / 16384))
    blocks = {16: 1.0, 32: 1.02, 64: 0.99}.get(int(flags.get("block-size", 16)), 1.0)  # type: ignore[call-overload]
    return float(60 * running / (1 + running / 180) * prefill * blocks)


def core(level: str, where: str, text: str) -> str:
    return f"(EngineCore pid=4711) {level} 11-30 10:45:31 [{where}] {text}"


def died(message: str, *, where: str) -> list[str]:
    """Return the last lines of a start that failed in the engine's process."""
    prefix = "(EngineCore pid=4711) "
    return [
        core("ERROR", "core.py:1490", "EngineCore failed to start."),
        core("ERROR", "core.py:1490", "Traceback (most recent call last):"),
        core("ERROR", "core.py:1490", f'  File "/venv/vllm/v1/worker/gpu_worker.py", line 410, in {where}'),
        core("ERROR", "core.py:1490", message),
        f"{prefix}Process EngineCore:",
        f"{prefix}Traceback (most recent call last):",
        f'{prefix}  File "/venv/vllm/v1/worker/gpu_worker.py", line 410, in {where}',
        prefix + message,
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ]


def out_of_memory(gib: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {gib:.2f} GiB. GPU 0 has a total capacity of "
        f"{TOTAL_GIB:.2f} GiB of which 0.19 GiB is free."
    )
