"""Predictions fitted to launches: how they miss, and when they say nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from sweep.memory.bounds import Bounds
from sweep.memory.likelihood import Likelihood
from sweep.model import Outcome

from .test_bounds import GIB, SEEN, TOTAL, flags, outcome


def ran(trial: int, tokens: int, seqs: int, share: float = 0.9, **more: float) -> Outcome:
    """Return a launch that kept 20 GiB, 1 MiB for each token and half of one for each sequence from the cache."""
    outside = 20 + tokens / 1024 + seqs / 2048
    told = flags(max_num_batched_tokens=tokens, max_num_seqs=seqs, gpu_memory_utilization=share)
    wanted = share * TOTAL
    return outcome(trial, told, total=TOTAL, requested=wanted, available=wanted - outside, free=78.2, **more)


THREE = [ran(0, 8192, 256), ran(1, 2048, 512), ran(2, 4096, 64), ran(3, 1024, 1024)]


def test_the_line_is_found() -> None:
    told = Likelihood(Bounds(THREE, {})).predicted(flags(max_num_batched_tokens=6144, max_num_seqs=512))
    assert told is not None
    assert told[0] == pytest.approx(26.25 * GIB, abs=0.05 * GIB)
    assert told[1] < 1.5 * GIB


def test_no_room_is_foreseen_where_no_bound_knows_it() -> None:
    bounds = Bounds(THREE, {})
    beyond = flags(max_num_batched_tokens=6144, gpu_memory_utilization=0.312)  # 24.7 GiB for 26.1
    assert bounds.excluded(beyond, SEEN) is None
    reason = str(Likelihood(bounds).excluded(beyond, SEEN))
    assert reason is not None
    assert "by what trials 0, 1, 2, 3 took, 26.1 GiB" in reason
    assert Likelihood(bounds).excluded(flags(max_num_batched_tokens=6144, gpu_memory_utilization=0.34), SEEN) is None


def test_a_batch_that_cannot_be_is_foreseen() -> None:
    reason = str(Likelihood(Bounds(THREE, {})).excluded(flags(max_num_batched_tokens=131_072), SEEN))
    assert reason is not None
    assert "are left for the KV cache" in reason
    fits = Likelihood(Bounds(THREE, {})).excluded(flags(max_num_batched_tokens=16_384), SEEN)
    assert fits is None


def test_too_few_launches_or_too_alike_say_nothing() -> None:
    low = flags(max_num_batched_tokens=6144, gpu_memory_utilization=0.3)
    assert Likelihood(Bounds(THREE[:2], {})).excluded(low, SEEN) is None
    alike = [ran(i, 4096, 256) for i in range(6)]
    assert Likelihood(Bounds(alike, {})).excluded(low, SEEN) is None
    # All with as many sequences: what more of those take is not known.
    line = [ran(i, tokens, 256) for i, tokens in enumerate((1024, 2048, 4096))]
    told = Likelihood(Bounds(line, {}))
    assert told.excluded(flags(max_num_batched_tokens=6144, gpu_memory_utilization=0.25), SEEN) is not None
    other = flags(max_num_batched_tokens=6144, max_num_seqs=512, gpu_memory_utilization=0.25)
    assert told.predicted(other) == (pytest.approx(26.125 * GIB, abs=0.1 * GIB), float("inf"))
    # Other flags, other memory.
    assert Likelihood(Bounds(THREE, {})).excluded({**low, "quantization": "fp8"}, SEEN) is None
    assert Likelihood(Bounds(THREE, {})).excluded({**low, "kv-cache-memory-bytes": GIB}, SEEN) is None


def test_what_was_short_beside_the_share_is_short_again() -> None:
    short = outcome(4, flags(gpu_memory_utilization=0.95, max_num_seqs=512), "oom_sampler_warmup", total=TOTAL)
    told = Likelihood(Bounds([THREE[0], short], {}))
    for changes in (
        {"gpu_memory_utilization": 0.95, "max_num_seqs": 1024},
        {"gpu_memory_utilization": 0.96, "max_num_seqs": 512, "max_num_batched_tokens": 16_384},
    ):
        reason = str(told.excluded(flags(**changes), SEEN))
        assert reason is not None
        assert "trial 4 with max-num-seqs 512 ran out of memory with" in reason
    assert told.excluded(flags(gpu_memory_utilization=0.95, max_num_seqs=256), SEEN) is None
    assert told.excluded(flags(gpu_memory_utilization=0.93, max_num_seqs=512), SEEN) is None
    enough = ran(5, 8192, 1024, share=0.96)
    again = Likelihood(Bounds([THREE[0], short, enough], {}))
    assert again.excluded(flags(gpu_memory_utilization=0.95, max_num_seqs=1024), SEEN) is None


def test_graphs_tell_how_much_more_sequences_need() -> None:
    few, many = ran(0, 8192, 64, share=0.7, graphs=0.5), ran(1, 8192, 1088, share=0.7, graphs=3.5)  # 3 GiB for 1024
    short = outcome(4, flags(gpu_memory_utilization=0.95, max_num_seqs=512), "oom_cudagraph_capture", total=TOTAL)
    told = Likelihood(Bounds([few, many, short], {}))  # with 3.0 GiB beside its share
    assert told.excluded(flags(gpu_memory_utilization=0.92, max_num_seqs=1536), SEEN) is not None  # 5.3 of 6.0
    assert told.excluded(flags(gpu_memory_utilization=0.92, max_num_seqs=768), SEEN) is None
    # A larger batch may leave room behind, so what is missing then is not foretold.
    larger = flags(gpu_memory_utilization=0.92, max_num_seqs=1536, max_num_batched_tokens=16_384)
    assert told.excluded(larger, SEEN) is None


@given(
    st.lists(st.tuples(st.integers(1, 65_536), st.integers(1, 4096), st.floats(0, 70)), min_size=3, max_size=12),
    st.integers(1, 65_536),
    st.integers(1, 4096),
)
def test_a_prediction_never_falls_with_size_and_always_has_an_error(
    rows: list[tuple[int, int, float]], tokens: int, seqs: int
) -> None:
    outcomes = [
        outcome(
            i, flags(max_num_batched_tokens=t, max_num_seqs=s), total=TOTAL, requested=71.28, available=71.28 - kept
        )
        for i, (t, s, kept) in enumerate(rows)
    ]
    told = Likelihood(Bounds(outcomes, {}))
    here = told.predicted(flags(max_num_batched_tokens=tokens, max_num_seqs=seqs))
    more = told.predicted(flags(max_num_batched_tokens=2 * tokens, max_num_seqs=2 * seqs))
    if here is None or more is None:
        assert len({row[:2] for row in rows}) < 3
        return
    assert more[0] >= here[0] >= 0
    assert here[1] > 0
