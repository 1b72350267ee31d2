"""A device that does not exist, with a server on it whose memory follows formulas: what fits, and what it logs.

The order is that of vLLM's start: the share of the memory against what is free, weights and the profiling run, the KV
cache, graphs, the sampler's warm-up. A part of the memory that profiling used is free again afterwards, so a larger
batch may cure what comes later; bounds must not overlook that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sweep.failure import Failure, FailureKind
from sweep.model import DeviceMemory, Flags, Measured, Outcome, ServerFacts

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """All memory in GiB. Drawn by `device_of`."""

    total: float
    held: float  # by others, before the server starts
    context: float
    weights: float
    kept: float  # by libraries, for good
    by_token: float
    by_sequence: float  # logits
    graphs: float
    graphs_by_sequence: float
    graphs_counted: bool  # profiling takes them off the cache, as since 0.21
    kv_by_token: float
    cpu: bool
    noise: float  # of what a launch keeps, and on a CPU of what is free

    @property
    def memory(self) -> DeviceMemory:
        free = self.total - self.held
        return DeviceMemory(int(self.total * GIB), int(free * GIB), "numa" if self.cpu else "nvml")

    def start(
        self, flags: Flags, rng: np.random.Generator | None
    ) -> tuple[FailureKind | None, ServerFacts, dict[str, float]]:
        """Return what became of a launch, what it logged, and the numbers of its message. rng: None for no noise."""
        wanted = float(flags["gpu-memory-utilization"]) * self.total  # type: ignore[arg-type]
        tokens, seqs = int(flags["max-num-batched-tokens"]), int(flags["max-num-seqs"])  # type: ignore[call-overload]
        length = int(flags["max-model-len"])  # type: ignore[call-overload]
        wobble = float(rng.uniform(-self.noise, self.noise)) if rng else 0.0
        free = self.total - self.held - self.context
        if wanted > free:
            bounds = {"free_bytes": free, "total_bytes": self.total, "requested_bytes": wanted}
            return "oom_free_memory_lt_requested", ServerFacts(), in_bytes(bounds)
        facts = ServerFacts(requested_bytes=rounded(wanted), total_bytes=rounded(self.total), free_bytes=rounded(free))
        if self.weights > free:
            return "oom_weights", facts, {}
        facts = replace(facts, weights_bytes=rounded(self.weights))
        batch = max(self.by_token * tokens, self.by_sequence * seqs)
        kept = (self.weights + self.kept + (0.0 if self.cpu else batch)) * (1 + wobble)
        graphs = self.graphs + self.graphs_by_sequence * seqs
        if not self.cpu and kept > free:
            return "oom_activation_profile", facts, {}
        available = wanted - kept - (graphs if self.graphs_counted else 0.0)
        facts = replace(facts, available_kv_bytes=rounded(available))
        if available <= 0:
            return "oom_kv_cache_none", facts, {}
        needed = length * self.kv_by_token
        if available < needed:
            fitting = int(available / self.kv_by_token)
            bounds = {"needed_bytes": needed, "available_bytes": available}
            numbers = {"max_model_len_tokens": float(length), "fitting_model_len_tokens": float(fitting)}
            return "oom_kv_cache_too_small", facts, in_bytes(bounds) | numbers
        if not self.cpu:
            beside = free - self.weights - self.kept - available
            if graphs > beside:
                return "oom_cudagraph_capture", facts, {}
            if graphs + 1.1 * self.by_sequence * seqs > beside:
                return "oom_sampler_warmup", facts, {}
        facts = replace(
            facts,
            graphs_bytes=None if self.cpu else rounded(graphs),
            kv_cache_tokens=int(available / self.kv_by_token),
            max_concurrency=round(available / needed, 2),
            max_model_len=length,
        )
        return None, facts, {}


def launch(device: Device, trial: int, flags: Flags, rng: np.random.Generator) -> Outcome:
    """Start a server and return the trial's outcome."""
    if device.cpu:
        device = replace(device, held=device.held + float(rng.uniform(0, 0.015)) * device.total)
    kind, facts, bounds = device.start(flags, rng)
    failure = None if kind is None else Failure(kind, "prune", "seen", "less", bounds=bounds or None)
    state = "complete" if failure is None else "infeasible"
    measured = Measured(state, failure=failure, server=facts, memory=device.memory)  # type: ignore[arg-type]
    return Outcome(trial, "search", flags, measured, "2026-01-01T00:00:00+00:00")


def device_of(rng: np.random.Generator) -> Device:
    """Draw a device, and a model that it could hold."""
    cpu = bool(rng.random() < 0.2)
    total = float(rng.choice([23.5, 31.2, 62.8] if cpu else [15.77, 23.6, 44.5, 79.1, 139.8]))
    hidden = float(rng.choice([2048, 4096, 8192]))
    return Device(
        total=total,
        held=float(rng.uniform(0.005, 0.08)) * total,
        context=0.3 if cpu else float(rng.uniform(0.3, 0.6)),
        weights=float(rng.uniform(0.1, 0.8)) * total,
        kept=float(rng.uniform(0.05, 1.0)),
        by_token=hidden * float(rng.uniform(10, 40)) * 2 / GIB,
        by_sequence=float(rng.choice([32e3, 128e3, 256e3])) * 4 * float(rng.uniform(1, 4)) / GIB,
        graphs=float(rng.uniform(0.05, 0.6)),
        graphs_by_sequence=float(rng.uniform(0.0, 0.6)) / 1024,
        graphs_counted=bool(rng.random() < 0.5),
        kv_by_token=float(rng.choice([28, 64, 128, 320])) / 2**20,
        cpu=cpu,
        noise=0.01 if cpu else 0.002,
    )


def flags_of(rng: np.random.Generator) -> Flags:
    """Draw a configuration of a wide space."""
    seqs = 2 ** int(rng.integers(4, 12))
    return {
        "gpu-memory-utilization": round(float(rng.uniform(0.3, 0.98)), 2),
        "max-num-seqs": seqs,
        "max-num-batched-tokens": max(seqs, 2 ** int(rng.integers(9, 16))),
        "max-model-len": 2048 * int(rng.choice([1, 2, 4])),
        "block-size": int(rng.choice([16, 32])),
        "enable-prefix-caching": bool(rng.random() < 0.5),
    }


def rounded(gib: float) -> int:
    """Return what is read from a log, which has two decimals."""
    return int(round(gib, 2) * GIB)


def in_bytes(gib: dict[str, float]) -> dict[str, float]:
    return {name: float(rounded(value)) for name, value in gib.items()}
