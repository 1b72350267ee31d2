"""The estimate: what is certain, what is likely, and how launches correct it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from sweep.memory.card import ModelCard, card_of
from sweep.memory.estimate import Comparison, compare, estimate
from sweep.memory.weights import Weights
from sweep.model import DeviceMemory, Flags, ServerFacts

from .test_card import CONFIGS, card, config

GIB = 2**30
H100 = DeviceMemory(int(79.2 * GIB), int(77.7 * GIB), "nvml")
NODE = DeviceMemory(int(23.54 * GIB), int(21.2 * GIB), "numa")
FLAGS: Flags = {
    "gpu-memory-utilization": 0.9,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 256,
    "max-model-len": 8192,
}


def loaded(name: str) -> ModelCard:
    """Return a card with weights as files would have them, so that their size is certain."""
    known = card(name)
    return card_of(name, config(name), Weights(2 * known.parameters, {"BF16": known.parameters}))


def test_llama_8b_on_80_gb() -> None:
    known = estimate(loaded("llama-3.1-8b"), FLAGS, H100)
    assert known.certain is None
    assert known.likely is None
    assert known.weights_bytes == 16_060_522_496
    assert known.weights_exact
    assert known.kv_bytes is not None
    assert known.kv_tokens is not None
    # 0.9 x 79.2 - 14.96 - about 1.5 GiB, at 128 KiB a token
    assert known.kv_bytes == pytest.approx(54.8 * GIB, abs=0.5 * GIB)
    assert known.kv_tokens == pytest.approx(known.kv_bytes / 131_072, rel=0.001)
    assert known.max_concurrency == pytest.approx(known.kv_tokens / 8192, rel=0.001)
    assert known.error_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-3.1-8b", {"gpu-memory-utilization": 0.999}, "asks for 79.12 GiB, and 77.70 of 79.20 are free"),
        ("llama-3.1-8b", {"gpu-memory-utilization": 0.1}, "the weights take 14.66 GiB"),
        ("llama-3.1-70b", {}, "the weights take"),
        ("llama-3.1-8b", {"gpu-memory-utilization": 0.3, "max-model-len": 131072}, "one request of full length"),
        ("llama-3.1-8b", {"kv-cache-memory-bytes": GIB, "max-model-len": 131072}, "one request of full length"),
        ("llama-3.1-70b", {"kv-cache-memory-bytes": 4 * GIB}, "the device has"),
        ("llama-3.1-8b", {"kv-cache-memory-bytes": 78 * GIB}, "kv-cache-memory-bytes asks for 78.00 GiB"),
    ],
)
def test_what_is_certain(name: str, changes: Flags, words: str) -> None:
    known = estimate(loaded(name), {**FLAGS, **changes}, H100)
    assert known.certain is not None
    assert words in str(known.certain)
    assert known.likely is None


@pytest.mark.parametrize("changes", [{"quantization": "fp8"}, {"cpu-offload-gb": 80}, {"tensor-parallel-size": 4}])
def test_weights_that_may_be_less_are_not_certain(changes: Flags) -> None:
    assert estimate(loaded("llama-3.1-70b"), {**FLAGS, **changes}, H100).certain is None


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"cpu-offload-gb": 6},
        {"offload-group-size": 4, "offload-num-in-group": 2},
        {"hf-overrides": {"num_hidden_layers": 4}},
        {"load-format": "bitsandbytes"},
        {"load-format": "dummy"},
        {"language-model-only": True},
        {"speculative-config": {"method": "ngram"}},
        {"enable-lora": True},
        {"data-parallel-size": 8, "enable-expert-parallel": True},
        {"a-flag-of-tomorrow": 3},
        {"tensor-parallel-size": "many"},
        {"max-num-batched-tokens": "many"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_flags_that_may_change_what_a_model_takes_leave_no_verdict(changes: Flags) -> None:
    """Neither before any launch, nor after one without them: such a flag is often the cure."""
    small = DeviceMemory(12 * GIB, int(11.8 * GIB), "nvml")
    facts = ServerFacts(requested_bytes=int(10.8 * GIB), available_kv_bytes=-5 * GIB, total_bytes=12 * GIB)
    for seen in ([], [(FLAGS, facts)], [(FLAGS, facts)] * 3):
        known = estimate(loaded("llama-3.1-8b"), {**FLAGS, **changes}, small, seen)
        assert (known.certain, known.likely) == (None, None)
        assert not known.corrected or "many" in changes.values()
        assert estimate(loaded("llama-3.1-8b"), FLAGS, small, seen).certain is not None
    # What does not rest on the model stays: the share against what is free.
    assert estimate(loaded("llama-3.1-8b"), {**FLAGS, **changes, "gpu-memory-utilization": 0.999}, small).certain


def test_flags_as_vllm_fills_them_in_change_nothing() -> None:
    """Values that vLLM 0.32 resolves for a plain model."""
    resolved: Flags = {
        "load-format": "auto", "model-impl": "auto", "runner": "auto", "convert": "auto", "dtype": "bfloat16",
        "language-model-only": False, "trust-remote-code": False, "kv-cache-dtype": "auto", "mamba-cache-mode": "none",
        "data-parallel-size": 1, "data-parallel-size-local": 1, "decode-context-parallel-size": 1, "nnodes": 1,
        "prefill-context-parallel-size": 1, "elastic-ep-max-dp-size": 1, "optimization-level": "O2",
        "performance-mode": "balanced", "enable-chunked-prefill": True, "watermark": 0.0, "ubatch-size": 0,
        "worker-cls": "vllm.v1.worker.gpu_worker.Worker", "worker-extension-cls": "", "model-weights": "",
        "swa-bounded-replay": True, "scheduler-reserve-full-isl": True, "replayssm-buffer-len": 16,
    }  # fmt: skip
    low = {**FLAGS, "gpu-memory-utilization": 0.1}
    assert estimate(loaded("llama-3.1-8b"), {**resolved, **low}, H100).certain is not None


@pytest.mark.parametrize("length", [-1, "-1", "auto", "8k", "8K", "long"])
def test_a_length_that_vllm_fits_itself_or_that_is_written_in_words(length: int | str) -> None:
    card24 = DeviceMemory(int(23.6 * GIB), int(23.4 * GIB), "nvml")
    known = estimate(loaded("llama-3.1-8b"), {**FLAGS, "max-model-len": length}, card24)
    assert (known.certain, known.likely) == (None, None)
    assert known.request_bytes == {"8k": 8000 * 131_072, "8K": 8192 * 131_072}.get(str(length))


@pytest.mark.parametrize(("size", "value"), [("4G", 4 * GIB), ("4g", 4 * 10**9), ("much", None), (0, None)])
def test_a_cache_in_words(size: int | str, value: int | None) -> None:
    known = estimate(loaded("llama-3.1-8b"), {**FLAGS, "kv-cache-memory-bytes": size}, H100)
    assert (known.certain, known.likely) == (None, None)
    assert known.kv_bytes == value or size == 0


def test_files_may_hold_more_than_is_loaded() -> None:
    """An output embedding that is tied, stored all the same; layers for a second token; the part that sees."""
    known = card("llama-3.1-8b")
    twice = card_of("m", config("llama-3.1-8b"), Weights(4 * known.parameters, {"BF16": 2 * known.parameters}))
    flags: Flags = {**FLAGS, "gpu-memory-utilization": 0.3}  # 23.8 GiB for 30, or for the 15 that are counted
    found = estimate(twice, flags, H100)
    assert (found.certain, found.likely) == (None, None)


def test_one_launch_alone_does_not_condemn_and_another_devices_does_not_count() -> None:
    """A process that grows while a launch profiles counts as the launch's own."""
    model, low = loaded("llama-3.1-8b"), {**FLAGS, "gpu-memory-utilization": 0.4}
    clean = estimate(model, low, H100)
    assert clean.kv_bytes is not None
    facts = ServerFacts(requested_bytes=int(71.28 * GIB), available_kv_bytes=20 * GIB, total_bytes=H100.total_bytes)
    assert estimate(model, low, H100, [(FLAGS, facts)]).likely is None
    assert estimate(model, low, H100, [(FLAGS, facts)] * 2).likely is not None
    elsewhere = ServerFacts(requested_bytes=int(21.6 * GIB), available_kv_bytes=GIB, total_bytes=24 * GIB)
    assert estimate(model, low, H100, [(FLAGS, elsewhere)] * 2) == clean


def test_computed_weights_of_an_unknown_family_leave_no_verdict() -> None:
    told = {**config("llama-3.1-70b"), "model_type": "another"}
    assert estimate(card_of("m", told), FLAGS, H100).likely is None
    quantized = {**config("llama-3.1-70b"), "quantization_config": {"quant_method": "bitsandbytes"}}
    assert estimate(card_of("m", quantized), {**FLAGS, "gpu-memory-utilization": 0.6}, H100).likely is None


def test_computed_weights_are_only_likely() -> None:
    known = estimate(card("llama-3.1-70b"), FLAGS, H100)
    assert not known.weights_exact
    assert known.certain is None
    assert known.likely is not None
    assert "left for the KV cache" in str(known.likely)


def test_a_share_that_leaves_nothing_for_cudas_context_is_likely_too_much() -> None:
    known = estimate(loaded("llama-3.1-8b"), {**FLAGS, "gpu-memory-utilization": 0.99}, H100)
    assert known.certain is None
    assert known.likely is not None
    assert "when the server has started" in str(known.likely)


def test_the_cpu_backend_as_it_was_seen() -> None:
    """vLLM 0.32 logged 6.38 GiB for the cache and 3,343,360 tokens for 0.3 of 23.54 GiB and 512 tokens a request."""
    seen = ServerFacts(kv_cache_tokens=3_343_360, available_kv_bytes=int(6.38 * GIB), requested_bytes=int(7.06 * GIB))
    flags: Flags = {"gpu-memory-utilization": 0.3, "max-model-len": 512, "enforce-eager": True}
    known = estimate(card("tiny-qwen2"), flags, NODE)
    told = {each.name: each for each in compare(known, seen)}
    assert told["KV cache"].error_frac == pytest.approx(0, abs=0.001)
    assert known.kv_tokens == seen.kv_cache_tokens
    # A KV cache of a given size is what it is, whatever the share.
    fixed = estimate(card("tiny-qwen2"), {**flags, "gpu-memory-utilization": 0.99, "kv-cache-memory-bytes": GIB}, NODE)
    assert (fixed.kv_bytes, fixed.kv_tokens, fixed.certain) == (GIB, 524_288, None)


def test_launches_correct_it() -> None:
    first = estimate(loaded("llama-3.1-8b"), FLAGS, H100)
    assert first.requested_bytes is not None
    assert first.kv_bytes is not None
    facts = ServerFacts(requested_bytes=first.requested_bytes, available_kv_bytes=first.kv_bytes - GIB)
    again = estimate(loaded("llama-3.1-8b"), FLAGS, H100, [(FLAGS, facts)])
    assert again.kv_bytes == pytest.approx(facts.available_kv_bytes, abs=2)
    assert again.corrected
    assert again.error_bytes < first.error_bytes
    other = estimate(loaded("llama-3.1-8b"), {**FLAGS, "gpu-memory-utilization": 0.5}, H100, [(FLAGS, facts)])
    assert other.kv_bytes == pytest.approx(first.kv_bytes - GIB - 0.4 * H100.total_bytes, abs=2)


def test_words_of_a_comparison() -> None:
    assert (
        Comparison("weights", "bytes", 14.2 * GIB, 14.25 * GIB).words == "weights 14.20 GiB expected, 14.25 seen (0 %)"
    )
    assert (
        Comparison("KV tokens", "tokens", 121_000, 118_432).words == "KV tokens 121,000 expected, 118,432 seen (-2 %)"
    )
    assert Comparison("KV cache", "bytes", -GIB, GIB).words == "KV cache -1.00 GiB expected, 1.00 seen"
    expected = estimate(loaded("llama-3.1-8b"), FLAGS, H100)
    assert compare(expected, ServerFacts()) == ()
    assert [c.name for c in compare(expected, ServerFacts(weights_bytes=GIB, kv_cache_tokens=5))] == [
        "weights",
        "KV tokens",
    ]


def test_without_memory_only_the_model_is_known() -> None:
    known = estimate(loaded("llama-3.1-8b"), FLAGS, None)
    assert (known.requested_bytes, known.kv_bytes, known.kv_tokens, known.certain) == (None, None, None, None)
    assert known.request_bytes == 8192 * 131_072


VALUE = st.sampled_from([None, True, 0, -1, 4, 1e30, 10**400, float("inf"), float("nan"), "8k", "auto", "x", [1], {}])


@given(
    st.dictionaries(st.sampled_from([*FLAGS, "kv-cache-memory-bytes", "tensor-parallel-size", "block-size"]), VALUE),
    st.sampled_from([DeviceMemory(0, 0, "nvml"), DeviceMemory(-1, -5, "numa"), H100, NODE, None]),
)
def test_no_value_of_a_flag_and_no_memory_is_an_error(flags: dict[str, Any], memory: DeviceMemory | None) -> None:
    odd = ServerFacts(requested_bytes=10**400, available_kv_bytes=-1, total_bytes=0)
    known = estimate(loaded("llama-3.1-8b"), flags, memory, [(flags, odd), (FLAGS, odd)])
    if memory is None or memory.total_bytes <= 0:
        assert (known.certain, known.likely) == (None, None)


@given(
    st.sampled_from(sorted(path.stem for path in CONFIGS.glob("*.json"))),
    st.fixed_dictionaries(
        {},
        optional={
            "gpu-memory-utilization": st.floats(0.01, 1.0),
            "max-num-batched-tokens": st.integers(1, 65_536),
            "max-num-seqs": st.integers(1, 4096),
            "max-model-len": st.integers(1, 10**6),
            "tensor-parallel-size": st.sampled_from([1, 2, 8]),
            "pipeline-parallel-size": st.sampled_from([1, 3]),
            "enforce-eager": st.booleans(),
            "kv-cache-dtype": st.sampled_from(["auto", "fp8", "nvfp4"]),
        },
    ),
    st.sampled_from([H100, NODE, None]),
)
def test_more_of_anything_leaves_no_more_cache(name: str, flags: dict[str, Any], memory: DeviceMemory | None) -> None:
    known = estimate(card(name), flags, memory)
    more = {**flags, "max-num-batched-tokens": 65_536, "max-num-seqs": 4096, "max-model-len": 10**6}
    larger = estimate(card(name), more, memory)
    if known.kv_bytes is not None:
        assert larger.kv_bytes is not None
        assert larger.kv_bytes <= known.kv_bytes
    if known.request_bytes is not None:
        assert larger.request_bytes is not None
        assert larger.request_bytes >= known.request_bytes
