"""How the cache is cut, against what vLLM 0.32's own functions return for the same layers."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from sweep.memory.pool import Pool, pool_of

from .test_card import CONFIGS, card

GIB = 2**30
# From vllm.v1.core.kv_cache_utils of 0.32: `_get_kv_cache_bytes_per_block` of `get_kv_cache_groups`,
# `_max_memory_usage_bytes_from_groups` and `get_kv_cache_capacity`, for block size 16, 8,192 tokens a request, twice
# 2,048 tokens in flight and a cache of 10 GiB.
SEEN = {
    ("llama-3.1-8b", 1): (2097152, 1073741824, 81920, 10.0),
    ("llama-3.1-8b", 2): (1048576, 536870912, 163840, 20.0),
    ("llama-3.1-8b", 16): (262144, 134217728, 655360, 80.0),
    ("llama-3.1-70b", 1): (5242880, 2684354560, 32768, 4.0),
    ("llama-3.1-70b", 2): (2621440, 1342177280, 65536, 8.0),
    ("qwen2.5-7b", 1): (917504, 469762048, 187232, 22.85546875),
    ("qwen2.5-7b", 16): (229376, 117440512, 748976, 91.427734375),
    ("mistral-7b-v0.1", 1): (2097152, 1075838976, 81760, 9.980506822612085),
    ("mistral-7b-v0.1", 2): (1048576, 537919488, 163520, 19.96101364522417),
    ("gemma-2-9b", 1): (2752512, 2821324800, 31169, 3.8048780487804876),
    ("gemma-2-9b", 16): (344064, 352665600, 249412, 30.445853658536585),
    ("gemma-3-12b", 1): (1048576, 2219835392, 39624, 4.837033538025508),
    ("gemma-3-12b", 2): (524288, 1109917696, 79249, 9.674067076051015),
    ("deepseek-v3", 1): (1124352, 575668224, 152784, 18.650390625),
    ("deepseek-v3", 16): (1124352, 575668224, 152784, 18.650390625),
    ("gpt-oss-20b", 1): (393216, 305528832, 287890, 35.142857142857146),
    ("gpt-oss-20b", 2): (196608, 152764416, 575791, 70.28700128700129),
}


@pytest.mark.parametrize(("name", "tensor"), SEEN)
def test_blocks_are_those_of_vllm(name: str, tensor: int) -> None:
    pool = pool_of(card(name), {"tensor-parallel-size": tensor})
    assert pool is not None
    tokens, concurrency = pool.capacity(10 * GIB, 8192, 4096)
    assert (pool.block_bytes, pool.request_bytes(8192, 4096), tokens, concurrency) == SEEN[name, tensor]


def test_flags_that_change_a_cache() -> None:
    def known(name: str, **flags: object) -> Pool:
        pool = pool_of(card(name), {key.replace("_", "-"): value for key, value in flags.items()})  # type: ignore[misc]
        assert pool is not None
        return pool

    whole = known("llama-3.1-8b")
    assert known("llama-3.1-8b", kv_cache_dtype="fp8").token_bytes * 2 == whole.token_bytes
    assert known("llama-3.1-8b", dtype="float32").token_bytes == 2 * whole.token_bytes
    assert known("llama-3.1-8b", kv_cache_dtype="fp8_e5m2", dtype="float32").token_bytes == whole.token_bytes // 2
    assert known("llama-3.1-8b", pipeline_parallel_size=4).token_bytes == whole.token_bytes // 4
    assert known("llama-3.1-8b", block_size=32).block_bytes == 2 * whole.block_bytes
    # Without the groups of a hybrid model every layer keeps every token.
    assert known("gemma-3-12b", disable_hybrid_kv_cache_manager=True).request_bytes(8192, 4096) == 8192 * 393_216


@pytest.mark.parametrize("flags", [{"kv-cache-dtype": "nvfp4"}, {"decode-context-parallel-size": 2}])
def test_what_is_not_known_is_said(flags: dict[str, object]) -> None:
    assert pool_of(card("llama-3.1-8b"), flags) is None  # type: ignore[arg-type]


@given(
    st.sampled_from(sorted(path.stem for path in CONFIGS.glob("*.json"))),
    st.integers(1, 200_000),
    st.integers(1, 32_768),
    st.integers(0, 2**36),
    st.sampled_from([1, 2, 4, 8]),
)
def test_longer_requests_need_no_less_and_more_devices_no_more(
    name: str, length: int, flying: int, kv: int, tensor: int
) -> None:
    one, several = pool_of(card(name), {}), pool_of(card(name), {"tensor-parallel-size": tensor})
    assert one is not None
    assert several is not None
    assert several.request_bytes(length, flying) <= one.request_bytes(length, flying)
    assert one.request_bytes(length, flying) <= one.request_bytes(length + 1, flying)
    tokens, concurrency = one.capacity(kv, length, flying)
    assert (concurrency >= 1) == (kv // one.block_bytes >= one.request_blocks(length, flying))
    assert tokens == int(concurrency * length)
