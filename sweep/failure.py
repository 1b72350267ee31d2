"""Why something went wrong: the kinds, what a sweep does about each, the numbers that a message may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# What a sweep does: teach the search that the configuration cannot run, try it again, leave it unknown, stop because
# every trial would fail alike, or nothing.
Treatment: TypeAlias = Literal["prune", "retry", "fail_trial", "abort_sweep", "ignore"]
Phase: TypeAlias = Literal["start", "load", "stop"]

# A failure's kind. The list is a contract; the rules that find a kind in a log stand in serve/failures.py.
FailureKind: TypeAlias = Literal[
    "oom_weights",
    "oom_activation_profile",
    "oom_kv_cache_none",
    "oom_kv_cache_too_small",
    "oom_free_memory_lt_requested",
    "oom_cudagraph_capture",
    "oom_sampler_warmup",
    "oom_runtime",
    "host_oom_killed",
    "invalid_argument",
    "unsupported_feature",
    "version_mismatch",
    "model_not_found",
    "auth_gated_model",
    "trust_remote_code_needed",
    "port_in_use",
    "gpu_busy_other_process",
    "nccl_or_distributed",
    "hang_timeout",
    "engine_dead",
    "client_404_model_name",
    "client_401",
    "client_timeout",
    "healthy",
    "other",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something went wrong, in the words that a person and the search both need."""

    kind: FailureKind
    treatment: Treatment
    evidence: str  # the decisive line of the log, or what was seen instead of one
    advice: str  # what to change, in plain words
    phase: Phase = "start"
    bounds: dict[str, float] | None = None  # numbers that the message names, with units in their keys (see BOUNDS)
    exit_code: int | None = None


# The numbers that a message of vLLM may name, by their keys in `Failure.bounds`.
BOUNDS: dict[str, str] = {
    "free_bytes": "free on the device when the server looked",
    "total_bytes": "all memory of the device",
    "requested_bytes": "what was asked for",
    "utilization_frac": "the share that was asked for",
    "needed_bytes": "KV cache that one request of full length needs",
    "available_bytes": "left for the KV cache; may be negative",
    "allocation_bytes": "the one allocation that failed",
    "max_model_len_tokens": "the longest request that was asked for",
    "fitting_model_len_tokens": "the longest request that would fit",
    "max_num_seqs": "sequences that were asked for",
    "fitting_num_seqs": "sequences that would fit",
    "world_size": "devices that were asked for",
    "gpus": "devices that are there",
}
