"""Flags that leave alone what a model's files say: how large its weights are, and what one request needs of the cache.

A list of what is known to be harmless, not of what is known to matter: where another flag is set, nothing follows from
the files.
"""

from __future__ import annotations

from sweep.model import Flags, FlagValue

# Whatever their value: they size batches and the cache (which the formulas count), choose kernels, or are the server's.
_NAMES = """
    gpu-memory-utilization max-num-batched-tokens max-num-seqs max-model-len kv-cache-memory-bytes block-size
    kv-cache-dtype tensor-parallel-size pipeline-parallel-size enforce-eager enable-prefix-caching
    prefix-caching-hash-algo prefix-cache-retention-interval scheduling-policy scheduler-reserve-full-isl
    enable-chunked-prefill async-scheduling stream-interval long-prefill-token-threshold
    long-prefill-token-threshold-adaptive prefill-schedule-interval watermark max-num-queued-reqs
    max-num-queued-tokens disable-hybrid-kv-cache-manager disable-sliding-window swa-bounded-replay
    mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype mamba-config replayssm-buffer-len attention-backend
    attention-config kernel-config linear-backend moe-backend ir-op-priority all2all-backend
    enable-flashinfer-autotune sparse-indexer-topk-backend disable-cascade-attn disable-custom-all-reduce
    use-fp64-gumbel compilation-config cudagraph-capture-sizes max-cudagraph-capture-size optimization-level
    performance-mode cudagraph-metrics distributed-executor-backend distributed-timeout-seconds
    cpu-distributed-timeout-seconds master-addr master-port node-rank numa-bind numa-bind-cpus numa-bind-nodes
    data-parallel-backend data-parallel-rank data-parallel-rpc-port disable-nccl-for-dp-synchronization
    dp-sync-interval dbo-decode-token-threshold dbo-prefill-token-threshold cp-kv-cache-interleave-size
    dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate eplb-config expert-placement-strategy
    fault-tolerance-config ec-manager-config kv-offloading-backend mm-processor-cache-gb mm-processor-cache-type
    mm-shm-cache-max-object-size-mb media-io-kwargs model served-model-name tokenizer tokenizer-mode
    tokenizer-revision skip-tokenizer-init generation-config override-generation-config hf-token download-dir seed
    max-logprobs logprobs-mode use-tqdm-on-load pt-load-map-location safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads max-parallel-loading-workers
    structured-outputs-config reasoning-config reasoning-parser tool-call-parser enable-auto-tool-choice
    chat-template logging-config log-level profiler-config aux-output-config kv-cache-metrics
    kv-cache-metrics-sample disable-log-stats enable-log-requests disable-log-requests otlp-traces-endpoint
    collect-detailed-traces jit-monitor-mode per-request-spec-decode-metrics host port api-server-count
    uvicorn-log-level shutdown-timeout renderer-num-workers -api-process-count -api-process-rank trust-remote-code
"""
_HARMLESS = frozenset(_NAMES.split())
# These only with values that say no more than that nothing is asked of them.
_AT_REST: dict[str, frozenset[FlagValue]] = {
    "load-format": frozenset({"safetensors"}),
    "model-impl": frozenset({"vllm"}),
    "runner": frozenset({"generate"}),
    "dtype": frozenset({"bfloat16", "float16", "half", "float32", "float"}),
    "data-parallel-size": frozenset({1}),
    "data-parallel-size-local": frozenset({1}),
    "decode-context-parallel-size": frozenset({1}),
    "prefill-context-parallel-size": frozenset({1}),
    "elastic-ep-max-dp-size": frozenset({1}),
    "nnodes": frozenset({1}),
    "mm-encoder-tp-mode": frozenset({"weights"}),
}


def unusual_flags(flags: Flags, quantization: str | None) -> list[str]:
    """Return the names of the flags that may change what the model takes, or that nothing is known of.

    quantization: of the checkpoint; one that is quantized already is not quantized by a flag.
    """
    return sorted(name for name, value in flags.items() if not _plain(name, value, quantized=quantization is not None))


def _plain(name: str, value: FlagValue, *, quantized: bool) -> bool:
    # Off is off, whatever the flag.
    if not value or name in _HARMLESS or (isinstance(value, str) and value in {"auto", "none"}):
        return True
    if name == "quantization":
        return quantized
    if name == "worker-cls":
        return str(value).startswith("vllm.")
    rest = _AT_REST.get(name, frozenset())
    return isinstance(value, int | str) and not isinstance(value, bool) and value in rest
