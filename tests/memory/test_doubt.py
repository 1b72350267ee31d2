"""What must teach nothing: other processes' growth, other devices, sizes and figures that cannot be read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sweep.failure import FailureKind
from sweep.memory.bounds import Bounds
from sweep.memory.likelihood import Likelihood
from sweep.memory.sizes import size_of
from sweep.model import DeviceMemory, Measured, Outcome, ServerFacts

from .test_bounds import BASE, GIB, SEEN, SMALL, TOTAL, flags, outcome
from .test_card import card

HALF = DeviceMemory(SEEN.total_bytes, 40 * GIB, "nvml")


def ran(trial: int, outside: float, memory: DeviceMemory = SEEN, **changes: Any) -> Outcome:
    """Return a launch that kept so many GiB from the cache."""
    wanted = TOTAL * changes.get("gpu_memory_utilization", 0.9)
    told = {"requested": wanted, "available": wanted - outside, "weights": 15.0, "total": TOTAL}
    return outcome(trial, flags(**changes), memory=memory, **told)


@pytest.mark.parametrize("kind", ["oom_weights", "oom_activation_profile"])
def test_one_failed_launch_does_not_exclude_other_sizes_or_shares(kind: FailureKind) -> None:
    """A process that grew while it loaded, and that no look saw, must not end a study."""
    bounds = Bounds([outcome(1, flags(), kind)], {})
    assert bounds.excluded(flags(), SEEN) is not None
    for changes in ({"gpu_memory_utilization": 0.8}, {"max_num_seqs": 512}, {"max_num_batched_tokens": 16384}):
        assert bounds.excluded(flags(**changes), SEEN) is None
    # Whoever took the memory still has it at the next look.
    taken = Bounds([outcome(1, flags(), kind), outcome(2, flags(enforce_eager=True), "hang_timeout", memory=HALF)], {})
    assert taken.excluded(flags(), SEEN) is None


def test_a_launch_whose_profile_held_anothers_memory_is_not_believed_alone() -> None:
    failed = outcome(1, flags(), "oom_kv_cache_none", requested=71.28, available=-0.5, weights=15.0, total=TOTAL)
    small = flags(gpu_memory_utilization=0.85)
    assert Bounds([failed], {}).excluded(small, SEEN) is None
    assert Bounds([failed, SMALL], {}).excluded(small, SEEN) is not None
    # One that kept 17 GiB for the same sizes, or 16 for half as many, shows that 71.8 were not all its own.
    for other in (ran(2, 17.0), ran(2, 16.0, max_num_seqs=128, max_num_batched_tokens=4096)):
        for order in ([failed, other], [other, failed]):
            assert Bounds(order, {}).excluded(small, SEEN) is None
            assert Bounds(order, {}).excluded(flags(gpu_memory_utilization=0.2), SEEN) is not None
    # A launch with other flags agrees, if it kept as much beside its weights.
    low = flags(gpu_memory_utilization=0.2)
    alike = ran(3, 17.5, enforce_eager=True)
    assert Bounds([ran(2, 17.0)], {}).excluded(low, SEEN) is None
    assert Bounds([ran(2, 17.0), alike], {}).excluded(low, SEEN) is not None


def test_what_is_missing_at_the_next_look_was_anothers() -> None:
    crowded = ran(1, 47.0)
    later = ran(2, 20.0, memory=DeviceMemory(SEEN.total_bytes, SEEN.free_bytes - 30 * GIB, "nvml"), max_num_seqs=16)
    bounds = Bounds([crowded, later], {})
    assert bounds.excluded(flags(gpu_memory_utilization=0.3), SEEN) is None  # 23.8 GiB, and 17 were its own
    assert bounds.excluded(flags(gpu_memory_utilization=0.2), SEEN) is not None


def test_running_short_with_more_beside_the_share_than_others_needed_is_not_believed() -> None:
    half = flags(max_num_seqs=128)
    fits = outcome(1, half, requested=71.28, total=TOTAL, free=78.2, available=40.0)  # 6.9 GiB beside it
    short = outcome(2, flags(gpu_memory_utilization=0.6), "oom_cudagraph_capture", total=TOTAL, free=78.2)
    again = flags(gpu_memory_utilization=0.65)
    odd = Bounds([fits, short], {})
    assert odd.excluded(again, SEEN) is None
    assert Likelihood(odd).excluded(again, SEEN) is None
    # Twice is not by accident.
    twice = outcome(3, flags(gpu_memory_utilization=0.55), "oom_cudagraph_capture", total=TOTAL, free=78.2)
    assert Bounds([fits, short, twice], {}).excluded(again, SEEN) is not None


def test_what_came_or_went_between_two_looks_is_not_what_a_server_takes() -> None:
    left = [outcome(1, flags(gpu_memory_utilization=0.5), memory=HALF, free=78.2, total=TOTAL, available=20)]
    usual = [
        outcome(trial, flags(gpu_memory_utilization=0.4), memory=HALF, free=39.5, total=TOTAL, available=20)
        for trial in (2, 3)
    ]
    assert Bounds([*left, *usual], {}).excluded(flags(), HALF) is not None
    came = outcome(1, flags(gpu_memory_utilization=0.4), free=39.5, total=TOTAL, available=20)
    assert Bounds([came], {}).excluded(flags(), SEEN) is None


def test_launches_on_another_device_teach_nothing() -> None:
    small = DeviceMemory(24 * GIB, int(23.7 * GIB), "nvml")
    told = {"requested": 21.6, "weights": 15.0, "free": 23.4, "total": 24.0, "available": 2.0}
    failed = [
        outcome(trial, flags(max_num_seqs=seqs), "oom_kv_cache_too_small", memory=small, **told)
        for trial, seqs in enumerate((256, 128, 64))
    ]
    low = flags(gpu_memory_utilization=0.2)
    bounds = Bounds(failed, {})
    assert bounds.excluded(low, small) is not None
    assert bounds.excluded(low, SEEN) is None
    assert Likelihood(bounds).excluded(low, SEEN) is None
    # With launches of its own it learns again, and by their total.
    again = Bounds([*failed, ran(5, 17.0), ran(6, 16.5, max_num_seqs=128)], {})
    assert "of the 15.8 GiB" in str(again.excluded(low, SEEN))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2k", 2000),
        ("2K", 2048),
        ("25.6k", 25_600),
        ("4G", 2**32),
        (" 128 ", 128),
        (8192.0, 8192),
        ("1.5K", None),
        ("-1", None),
        ("auto", None),
        ("", None),
        (0, None),
        (True, None),
        (1.5, None),
        (math.inf, None),
        (math.nan, None),
        (10**400, None),
        ([1], None),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: object, value: int | None) -> None:
    assert size_of(text) == value


def test_sizes_in_words_are_compared_as_numbers_and_those_that_cannot_be_read_are_like_nothing() -> None:
    failed = [outcome(trial, flags(max_num_batched_tokens="16k"), "oom_activation_profile") for trial in (1, 2)]
    bounds = Bounds(failed, {})
    assert bounds.excluded(flags(max_num_batched_tokens="2k"), SEEN) is None
    assert bounds.excluded(flags(max_num_batched_tokens=32768), SEEN) is not None
    assert bounds.excluded(flags(max_num_batched_tokens="many"), SEEN) is None
    odd = [outcome(trial, flags(max_num_batched_tokens="many"), "oom_activation_profile") for trial in (1, 2)]
    assert Bounds(odd, {}).excluded(flags(max_num_batched_tokens="lots"), SEEN) is None
    assert Bounds(odd, {}).excluded({k: v for k, v in BASE.items() if "tokens" not in k}, SEEN) is None
    # A cache of a given size leaves the share alone, however the size is written.
    for written in ("4G", 4 * GIB, "four"):
        fixed = ran(1, 68.0, kv_cache_memory_bytes=written)
        assert Bounds([fixed, SMALL], {}).excluded(flags(gpu_memory_utilization=0.8), SEEN) is None


def test_keeping_prefixes_may_change_what_a_request_needs_where_layers_have_a_state() -> None:
    told = {"needed": 9.0, "available": 4.0}
    failed = outcome(3, flags(enable_prefix_caching=True), "oom_kv_cache_too_small", told, requested=71.28, total=TOTAL)
    assert failed.measured.failure is not None
    assert failed.measured.failure.bounds is not None
    failed.measured.failure.bounds["max_model_len_tokens"] = 8192
    seen = [failed, SMALL]
    off, on = flags(enable_prefix_caching=False), flags(enable_prefix_caching=True)
    assert Bounds(seen, {}).excluded(on, SEEN) is not None
    assert Bounds(seen, {}).excluded(off, SEEN) is None
    assert Bounds(seen, {}, card=card("llama-3.1-8b")).excluded(off, SEEN) is not None  # all of its layers keep tokens


FIGURES = ["requested", "weights", "free", "total", "available_kv", "graphs"]
ODD = st.sampled_from([0, -5, 1e30, math.inf, -math.inf, math.nan, 10**400])
VALUE = ODD | st.sampled_from([True, "128", "16k", "auto", "x", [1], {"a": [1]}, None, 4096, 0.9])


@given(
    facts=st.dictionaries(st.sampled_from(FIGURES), ODD, min_size=1),
    changes=st.dictionaries(st.sampled_from(sorted(BASE)), VALUE),
    looked=st.booleans(),
)
def test_damaged_figures_and_flags_raise_nothing_and_exclude_nothing(
    facts: dict[str, Any], changes: dict[str, Any], *, looked: bool
) -> None:
    memory = SEEN if looked else None
    server = ServerFacts(**{f"{name}_bytes": value for name, value in facts.items()}, max_concurrency=math.nan)
    damaged = [
        Outcome(i, "search", flags(max_num_seqs=64 * 2**i), Measured("complete", server=server, memory=memory), "")
        for i in range(4)
    ]
    bounds = Bounds(damaged, {})
    for told in (flags(max_num_seqs=33), flags(max_num_seqs=512)):
        assert bounds.excluded(told, memory) is None
        assert Likelihood(bounds).excluded(told, memory) is None
    strange = {**BASE, **changes}
    bounds.excluded(strange, memory)
    Likelihood(Bounds([*damaged, ran(5, 17.0)], {})).excluded(strange, memory)
    Bounds([Outcome(9, "search", strange, damaged[0].measured, ""), SMALL], {}).excluded(strange, memory)
