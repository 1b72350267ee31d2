"""What launches teach: each direction that holds, each that does not; nothing that would run is excluded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sweep.failure import Failure, FailureKind, Phase
from sweep.memory.bounds import Bounds
from sweep.memory.likelihood import Likelihood
from sweep.model import DeviceMemory, Flags, Measured, Outcome, ServerFacts, State

from .device import device_of, flags_of, launch
from .test_card import card

GIB = 2**30
TOTAL = 79.2
BASE: Flags = {
    "gpu-memory-utilization": 0.9,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 256,
    "max-model-len": 8192,
    "dtype": "bfloat16",
}
SEEN = DeviceMemory(int(TOTAL * GIB), int(78.7 * GIB), "nvml")
NODE = DeviceMemory(int(24 * GIB), int(20 * GIB), "numa")


def flags(**changes: Any) -> Flags:
    return {**BASE, **{name.replace("_", "-"): value for name, value in changes.items()}}


def outcome(
    trial: int,
    told: Flags,
    kind: FailureKind | None = None,
    bounds: dict[str, float] | None = None,
    *,
    phase: Phase = "start",
    memory: DeviceMemory | None = SEEN,
    evidence: str = "",
    treatment: Any = "prune",
    **gib: float,
) -> Outcome:
    """Return a trial. bounds: keys without their unit, in GiB. gib: figures of the log, likewise."""
    keys = {"available": "available_kv"}
    facts: dict[str, Any] = {f"{keys.get(name, name)}_bytes": int(value * GIB) for name, value in gib.items()}
    named = {f"{name}_bytes": value * GIB for name, value in (bounds or {}).items()}
    failure = Failure(kind, treatment, evidence, "", phase, named or None) if kind else None
    state: State = "infeasible" if failure else "complete"
    measured = Measured(state, failure=failure, server=ServerFacts(**facts), memory=memory)
    return Outcome(trial, "search", told, measured, "2026-01-01T00:00:00+00:00")


# A launch of a small batch that ran: what another one kept from the cache is then not one launch's word alone.
SMALL = outcome(90, flags(max_num_batched_tokens=512), requested=71.28, total=TOTAL, available=61.28)
REFUSED = outcome(
    4,
    flags(gpu_memory_utilization=0.95),
    "oom_free_memory_lt_requested",
    {"free": 70.2, "total": TOTAL, "requested": 75.24},
    memory=DeviceMemory(int(TOTAL * GIB), int(70.65 * GIB), "nvml"),
)


def test_more_than_was_found_free() -> None:
    bounds = Bounds([REFUSED], {})
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.93), None))
    assert reason == ("trial 4 with gpu-memory-utilization 0.95 found only 70.2 of 79.2 GiB free; this asks for 73.7")
    assert bounds.excluded(flags(gpu_memory_utilization=0.88), None) is None


def test_what_is_free_now_counts_less_what_a_server_takes_before_it_looks() -> None:
    bounds = Bounds([REFUSED], {})
    roomy = DeviceMemory(int(TOTAL * GIB), int(75.0 * GIB), "nvml")
    assert bounds.excluded(flags(gpu_memory_utilization=0.93), roomy) is None  # 73.7 of 74.5
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.95), roomy))
    assert reason is not None
    assert reason.endswith("this asks for 75.2, and about 74.6 are free now")
    assert bounds.excluded(flags(gpu_memory_utilization=0.88), replace(roomy, free_bytes=60 * GIB)) is not None


def test_a_healthy_log_tells_what_is_free_too() -> None:
    bounds = Bounds([outcome(0, flags(), free=78.2, total=TOTAL, requested=71.28, available=50)], {})
    assert bounds.excluded(flags(gpu_memory_utilization=0.99), SEEN) is not None
    assert bounds.excluded(flags(gpu_memory_utilization=0.98), SEEN) is None


def test_a_later_launch_that_ran_with_as_much_corrects_it() -> None:
    again = flags(gpu_memory_utilization=0.93)
    ran = outcome(5, flags(gpu_memory_utilization=0.94), memory=REFUSED.measured.memory, total=TOTAL)
    assert Bounds([REFUSED, ran], {}).excluded(again, None) is None
    assert Bounds([REFUSED, ran], {}).excluded(again, REFUSED.measured.memory) is None
    assert Bounds([replace(ran, trial=3), REFUSED], {}).excluded(again, None) is not None


def test_memory_that_somebody_else_held_teaches_nothing() -> None:
    held = replace(REFUSED.measured.failure, treatment="retry")  # type: ignore[type-var]
    bounds = Bounds([replace(REFUSED, measured=replace(REFUSED.measured, failure=held))], {})
    assert bounds.excluded(flags(gpu_memory_utilization=0.93), None) is None


def test_before_any_launch_only_the_device_speaks() -> None:
    bounds = Bounds([], {})
    assert bounds.excluded(flags(), None) is None
    assert bounds.excluded(flags(), SEEN) is None
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.95), replace(SEEN, free_bytes=70 * GIB)))
    assert reason is not None
    assert "70.0 GiB are free" in reason
    assert Bounds([], {}).excluded({}, SEEN) is None  # a share that nobody knows


def test_the_nodes_own_movement_is_allowed_for() -> None:
    bounds = Bounds([], {})
    share = NODE.free_bytes / NODE.total_bytes
    assert bounds.excluded(flags(gpu_memory_utilization=share + 0.02), NODE) is None
    assert bounds.excluded(flags(gpu_memory_utilization=share + 0.04), NODE) is not None
    # With a cache of its own size the CPU backend does not look at the share.
    assert bounds.excluded(flags(gpu_memory_utilization=0.99, kv_cache_memory_bytes=GIB), NODE) is None
    assert bounds.excluded(flags(gpu_memory_utilization=0.999, kv_cache_memory_bytes=GIB), SEEN) is None
    assert "asks for 40.0 GiB" in str(bounds.excluded(flags(kv_cache_memory_bytes=40 * GIB), NODE))


def test_launches_of_a_real_cpu_backend() -> None:
    """Figures of vLLM 0.32's own logs, for one model on a node of 23.54 GiB."""
    base: Flags = {"enforce-eager": True, "max-model-len": 512}
    node = DeviceMemory(int(23.54 * GIB), int(21.3 * GIB), "numa")
    low = outcome(
        1,
        {**base, "gpu-memory-utilization": 0.02},
        "oom_kv_cache_none",
        {"free": 21.78, "total": 23.54, "available": -0.22, "requested": 0.47},
        evidence="on kv cache allocation is less than requested memory for kv (-0.22/0.47 GiB)",
        memory=node,
    )
    high = outcome(
        2,
        {**base, "gpu-memory-utilization": 0.999},
        "oom_free_memory_lt_requested",
        {"free": 21.23, "total": 23.54, "requested": 23.52},
        memory=node,
    )
    bounds = Bounds([low, high], {})
    for share in (0.001, 0.01, 0.025, 0.95, 0.97):
        assert bounds.excluded({**base, "gpu-memory-utilization": share}, node) is not None, share
    for share in (0.03, 0.05, 0.5, 0.9):
        assert bounds.excluded({**base, "gpu-memory-utilization": share}, node) is None, share


def test_a_cache_that_could_not_be_is_not_tried_with_a_smaller_share() -> None:
    failed = outcome(2, flags(gpu_memory_utilization=0.5), "oom_kv_cache_none", total=TOTAL, available=-1.4)
    bounds = Bounds([failed, SMALL], {})  # 39.6 + 1.4 = 41 GiB go elsewhere
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.51), None))
    assert reason is not None
    assert reason.startswith(
        "weights and batches took 41.0 GiB beside the KV cache in trial 2 (max-num-batched-tokens 8192"
    )
    assert bounds.excluded(flags(gpu_memory_utilization=0.53), None) is None
    assert bounds.excluded(flags(gpu_memory_utilization=0.45, max_num_seqs=512), None) is not None
    # Fewer sequences or a smaller batch may leave something.
    assert bounds.excluded(flags(gpu_memory_utilization=0.5, max_num_seqs=128), None) is None
    assert bounds.excluded(flags(gpu_memory_utilization=0.5, max_num_batched_tokens=4096), None) is None
    # So may anything that is not known to have no say, but not what has none.
    assert bounds.excluded(flags(gpu_memory_utilization=0.5, enforce_eager=True), None) is None
    assert (
        bounds.excluded(flags(gpu_memory_utilization=0.5, enable_prefix_caching=False, block_size=32), None) is not None
    )


def test_without_a_figure_the_share_itself_is_the_least() -> None:
    bounds = Bounds([outcome(2, flags(gpu_memory_utilization=0.5), "oom_kv_cache_none", total=TOTAL), SMALL], {})
    assert bounds.excluded(flags(gpu_memory_utilization=0.49), None) is not None
    assert bounds.excluded(flags(gpu_memory_utilization=0.52), None) is None


def test_a_launch_that_ran_tells_how_small_a_share_may_be() -> None:
    ran = outcome(0, flags(), requested=71.28, total=TOTAL, available=40.0)
    bounds = Bounds([ran, SMALL], {}, card=card("llama-3.1-8b"))
    assert bounds.excluded(flags(gpu_memory_utilization=0.39), None) is not None  # 30.9 of 31.3
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.402), None))  # 0.56 are left, a request needs 1 GiB
    assert reason is not None
    assert "one request of 8192 tokens needs" in reason
    assert bounds.excluded(flags(gpu_memory_utilization=0.42), None) is None


def test_what_is_left_is_said_with_a_margin() -> None:
    ran = outcome(0, flags(), requested=71.28, total=TOTAL, available=31.28)  # 40 GiB go elsewhere, give or take 0.2
    bounds = Bounds([ran, SMALL], {})
    assert bounds.excluded(flags(gpu_memory_utilization=39.9 / TOTAL), SEEN) is None
    assert bounds.excluded(flags(gpu_memory_utilization=39.7 / TOTAL), SEEN) is not None


def test_the_log_of_a_launch_that_ran_tells_what_a_request_needs() -> None:
    ran = outcome(0, flags(), requested=71.28, total=TOTAL, available=31.28)
    server = replace(ran.measured.server, max_model_len=8192, max_concurrency=15.64)  # 2 GiB a request
    bounds = Bounds([replace(ran, measured=replace(ran.measured, server=server)), SMALL], {})
    reason = str(bounds.excluded(flags(gpu_memory_utilization=41.5 / TOTAL), SEEN))
    assert reason is not None
    assert reason.endswith("one request of 8192 tokens needs 2.0 by trial 0")
    assert bounds.excluded(flags(gpu_memory_utilization=42.1 / TOTAL), SEEN) is None
    assert bounds.excluded(flags(gpu_memory_utilization=41.5 / TOTAL, max_model_len=4096), SEEN) is None


def test_what_is_free_beside_a_running_server_is_not_what_it_may_ask_for() -> None:
    told = {"free": 3.0, "total": 24.0, "requested": 16.0}
    evidence = "on kv cache allocation is less than requested memory for kv (12.0/16.0 GiB)"
    late = outcome(1, flags(gpu_memory_utilization=0.67), "oom_free_memory_lt_requested", told, evidence=evidence)
    assert Bounds([late], {}).excluded(flags(gpu_memory_utilization=0.3), None) is None


def test_weights_alone_are_the_least_of_any_launch() -> None:
    ran = outcome(0, flags(), requested=71.28, total=TOTAL, available=40.0, weights=30.0)
    small = flags(gpu_memory_utilization=0.37, max_num_seqs=1, max_num_batched_tokens=512)
    assert "the weights took" in str(Bounds([ran], {}).excluded(small, None))


def test_a_request_needs_what_the_message_says() -> None:
    told = {"needed": 2.5, "available": 1.5}
    failed = outcome(3, flags(gpu_memory_utilization=0.5), "oom_kv_cache_too_small", told, total=TOTAL)
    assert failed.measured.failure is not None
    assert failed.measured.failure.bounds is not None
    failed.measured.failure.bounds.update(max_model_len_tokens=8192, fitting_model_len_tokens=4915)
    bounds = Bounds([failed, SMALL], {})  # 38.1 GiB go elsewhere
    reason = str(bounds.excluded(flags(gpu_memory_utilization=0.505), None))
    assert reason is not None
    assert reason.endswith("needs 2.5 by trial 3")
    assert bounds.excluded(flags(gpu_memory_utilization=0.52), None) is None
    # A longer request than the longest that would fit, with no more memory.
    assert (
        bounds.excluded(flags(gpu_memory_utilization=0.49, max_model_len=5000), None) is None
    )  # shorter: not compared
    longer = flags(gpu_memory_utilization=0.505, max_model_len=16384)
    assert bounds.excluded(longer, None) is not None
    # With a cache of its own size only the request counts.
    assert bounds.excluded(flags(kv_cache_memory_bytes=2 * GIB), None) is not None
    assert bounds.excluded(flags(kv_cache_memory_bytes=3 * GIB), None) is None
    assert bounds.excluded(flags(num_gpu_blocks_override=10_000, gpu_memory_utilization=0.2), None) is None


@pytest.mark.parametrize("kind", ["oom_weights", "oom_activation_profile"])
def test_what_comes_before_the_cache_fails_with_any_share(kind: FailureKind) -> None:
    bounds = Bounds([outcome(1, flags(), kind), outcome(3, flags(gpu_memory_utilization=0.8), kind)], {})
    for share in (0.5, 0.9, 0.95):
        assert bounds.excluded(flags(gpu_memory_utilization=share), SEEN) is not None
        assert bounds.excluded(flags(gpu_memory_utilization=share, max_num_batched_tokens=16384), SEEN) is not None
    smaller = bounds.excluded(flags(max_num_batched_tokens=4096), SEEN)
    assert (smaller is None) == (kind == "oom_activation_profile")
    assert bounds.excluded(flags(quantization="fp8"), SEEN) is None
    # Failed beside somebody else's work, which is gone now, by our look or by the server's.
    crowded = outcome(1, flags(), kind, memory=replace(SEEN, free_bytes=40 * GIB))
    assert Bounds([crowded], {}).excluded(flags(), SEEN) is None
    assert Bounds([outcome(1, flags(), kind, free=40.0, total=TOTAL)], {}).excluded(flags(), SEEN) is None
    ran = outcome(2, flags(max_num_seqs=512))
    assert Bounds([outcome(1, flags(), kind), ran], {}).excluded(flags(), SEEN) is None


@pytest.mark.parametrize("kind", ["oom_sampler_warmup", "oom_cudagraph_capture", "oom_runtime"])
def test_what_comes_after_the_cache_fails_with_no_smaller_share(kind: FailureKind) -> None:
    phase: Phase = "load" if kind == "oom_runtime" else "start"
    failed = outcome(1, flags(), kind, phase=phase)
    bounds = Bounds([failed], {})
    assert bounds.excluded(flags(), SEEN) is not None
    assert bounds.excluded(flags(gpu_memory_utilization=0.95, max_num_seqs=512), SEEN) is not None
    assert bounds.excluded(flags(gpu_memory_utilization=0.89), SEEN) is None
    assert bounds.excluded(flags(max_num_seqs=128), SEEN) is None
    assert bounds.excluded(flags(max_num_batched_tokens=16384), SEEN) is None
    assert Bounds([failed, outcome(2, flags(gpu_memory_utilization=0.92))], {}).excluded(flags(), SEEN) is None


def test_values_of_absent_flags_are_the_defaults() -> None:
    failed = [outcome(trial, {}, "oom_activation_profile") for trial in (0, 1)]
    defaults = {**BASE, "max-num-seqs": 1024}
    bounds = Bounds(failed, {}, defaults)
    assert bounds.excluded({"max-num-seqs": 2048}, SEEN) is not None
    assert bounds.excluded({"max-num-seqs": 512}, SEEN) is None
    assert bounds.excluded({"dtype": "bfloat16"}, SEEN) is not None
    # Beside this flag defaults are others.
    assert bounds.excluded({"performance-mode": "throughput"}, SEEN) is None
    assert Bounds(failed, {}).excluded({"max-num-seqs": 2048}, SEEN) is None  # what it was is not known


def test_other_failures_and_trials_that_never_started_teach_nothing() -> None:
    others = [outcome(1, flags(), "invalid_argument"), outcome(2, flags(), "hang_timeout", phase="load")]
    never = replace(REFUSED, measured=replace(REFUSED.measured, state="skipped"))
    bounds = Bounds([*others, never], {})
    assert bounds.excluded(flags(), SEEN) is None
    assert bounds.excluded(flags(gpu_memory_utilization=0.93), None) is None


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_nothing_that_would_run_is_excluded(seed: int) -> None:
    """On any device, after any launches: with what is free now, and by the last launch's word."""
    rng = np.random.default_rng(seed)
    device = device_of(rng)
    outcomes: list[Outcome] = []
    for _ in range(25):
        told = flags_of(rng)
        bounds = Bounds(outcomes, {})
        runs = device.start(told, None)[0] is None
        for memory in (device.memory, None):
            reason = bounds.excluded(told, memory)
            assert not (runs and reason), reason
        if bounds.excluded(told, device.memory) is None:
            outcomes.append(launch(device, len(outcomes), told, rng))


def test_few_launches_fail_and_few_are_excluded_wrongly() -> None:
    """The likelihood beside the bounds, on fixed devices."""
    launched, failed, likely, wrong, impossible = 0, 0, 0, 0, 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        device = device_of(rng)
        outcomes: list[Outcome] = []
        for _ in range(40):
            told = flags_of(rng)
            runs = device.start(told, None)[0] is None
            impossible += not runs
            bounds = Bounds(outcomes, {})
            if bounds.excluded(told, device.memory):
                continue
            if Likelihood(bounds).excluded(told, device.memory):
                likely += 1
                wrong += runs
                continue
            outcomes.append(launch(device, len(outcomes), told, rng))
            launched += 1
            failed += not runs
    assert impossible > 900
    assert failed < 0.2 * impossible
    assert likely > 40
    assert wrong <= 0.05 * likely
