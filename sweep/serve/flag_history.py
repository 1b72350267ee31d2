"""Flags that vLLM once had, and what stands in their place. Versions are those of vLLM; ~ is off by one at most."""

from __future__ import annotations

_SPECULATIVE = "gone since 0.8.2: write speculative-config: {method: …, model: …, num_speculative_tokens: …}"
_PARTIAL_PREFILLS = "gone since ~0.26, without a successor; long-prefill-token-threshold has stayed"
_V0_ONLY = "gone since 0.11 with the V0 engine, without a successor: leave it out"
_MULTI_STEP = "gone since 0.10.1: async-scheduling, on by default, has taken its place"
_RAY = "gone: write distributed-executor-backend: ray"
_CAPTURE = "gone since 0.11: write max-cudagraph-capture-size, which counts sequences in a batch and not their length"

# Asked only for a name that the installed vLLM does not know: an older one may well have it.
REMOVED: dict[str, str] = {
    "calculate-kv-scales": "gone since ~0.27: take a checkpoint that has been quantized with its scales",
    "cuda-graph-sizes": "renamed in 0.11.1: write cudagraph-capture-sizes, or max-cudagraph-capture-size",
    "device": "gone since 0.10: the platform is that of the installed build of vLLM",
    "disable-async-output-proc": _V0_ONLY,
    "disable-log-requests": "gone since 0.17: requests are not logged unless enable-log-requests is true",
    "enable-reasoning": "gone: reasoning-parser alone switches it on",
    "engine-use-ray": _RAY,
    "guided-decoding-backend": "gone since 0.12: write structured-outputs-config: {backend: …}",
    "max-context-len-to-capture": _CAPTURE,
    "max-long-partial-prefills": _PARTIAL_PREFILLS,
    "max-num-partial-prefills": _PARTIAL_PREFILLS,
    "max-seq-len-to-capture": _CAPTURE,
    "multi-step-stream-outputs": _MULTI_STEP,
    "ngram-prompt-lookup-max": _SPECULATIVE,
    "ngram-prompt-lookup-min": _SPECULATIVE,
    "num-lookahead-slots": "gone since ~0.12: speculative-config says how many tokens are drafted",
    "num-scheduler-steps": _MULTI_STEP,
    "num-speculative-tokens": _SPECULATIVE,
    "preemption-mode": "gone since 0.11: a preempted request is always computed anew",
    "rope-scaling": "gone since ~0.12: write hf-overrides: {rope_parameters: {…}}",
    "rope-theta": "gone: write hf-overrides: {rope_parameters: {rope_theta: …}}",
    "scheduler-delay-factor": _V0_ONLY,
    "speculative-draft-tensor-parallel-size": _SPECULATIVE,
    "speculative-max-model-len": _SPECULATIVE,
    "speculative-model": _SPECULATIVE,
    "swap-space": "gone since ~0.18, without a successor: preempted requests are computed anew; leave it out",
    "task": "gone since ~0.13: write runner: … or convert: …",
    "use-v2-block-manager": "gone since 0.10: the only block manager there is; leave it out",
    "worker-use-ray": _RAY,
}
