"""What to change, in plain words, with the numbers of the message. For memory in steps, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sweep.failure import FailureKind

_GIB = 1024**3
Numbers = Mapping[str, float]


def advice(kind: FailureKind, own: str, numbers: Numbers) -> str:
    """Return the advice for a kind of failure. own: that of the rule that found it, which knows more than the kind."""
    if kind in _MEMORY:
        seen, steps = _MEMORY[kind](numbers)
        return " ".join(part for part in (own, seen, _numbered(steps)) if part)
    return own or _PLAIN.get(kind, _UNKNOWN)


def _numbered(steps: list[str]) -> str:
    return " ".join(f"{i}. {step}" for i, step in enumerate(steps, 1))


def gib(value: float) -> str:
    """Write bytes as people read them: 76.1 GiB, 212 MiB."""
    if value and abs(value) < _GIB / 10:
        return f"{value / 1024**2:,.0f} MiB"
    return f"{value / _GIB:,.2f}".rstrip("0").rstrip(".") + " GiB"


def fitting_utilization(numbers: Numbers) -> float | None:
    """Return the highest gpu-memory-utilization that what was free would have allowed, in hundredths.

    Where the allocation for the KV cache failed, what the server had taken by then counts as free.
    """
    free, total, wanted = (numbers.get(f"{name}_bytes") for name in ("free", "total", "requested"))
    if free is None or not total or wanted is None:
        return None
    taken = wanted - numbers.get("allocation_bytes", wanted)
    return math.floor(min(100.0, 100 * (free + taken) / total + 1e-9)) / 100


def _weights(numbers: Numbers) -> tuple[str, list[str]]:
    seen = (
        "The weights alone do not fit" + _on_device(numbers) + ". gpu-memory-utilization and max-model-len do not help."
    )
    return seen, [
        "End whatever else uses the GPU.",
        "Take a quantized checkpoint (quantization) or a smaller model.",
        "Raise tensor-parallel-size: more GPUs share the weights.",
        "Let cpu-offload-gb keep a part in the host's memory; that is slow.",
    ]


def _on_device(numbers: Numbers) -> str:
    total, free, wanted = (numbers.get(f"{name}_bytes") for name in ("total", "free", "allocation"))
    if total is None:
        return "" if wanted is None else f": {gib(wanted)} more were needed"
    said = f" in {gib(total)}"
    if wanted is not None and free is not None:
        said += f" ({gib(wanted)} more were needed and {gib(free)} free)"
    return said


def _profile(numbers: Numbers) -> tuple[str, list[str]]:
    return "The largest batch did not fit beside the weights" + _on_device(numbers) + ".", [
        "Lower max-num-batched-tokens.",
        "Lower max-num-seqs; of a multimodal model also limit-mm-per-prompt.",
        "Lower max-model-len if chunked prefill is off.",
        "Take a quantized checkpoint, or raise tensor-parallel-size.",
    ]


def _free(numbers: Numbers) -> tuple[str, list[str]]:
    free, total, wanted = (numbers.get(f"{name}_bytes") for name in ("free", "total", "requested"))
    fitting = fitting_utilization(numbers)
    limit = "below what is free" if not fitting else f"to at most {fitting:.2f}"
    steps = [
        f"Set gpu-memory-utilization {limit}.",
        "Or end what else uses the device, and wait until its memory is back.",
    ]
    if free is None or total is None:
        return "Less memory is free than gpu-memory-utilization asks for.", steps
    wanted = numbers.get("allocation_bytes", wanted)
    use = "is what the KV cache was to have" if "allocation_bytes" in numbers else "were asked for"
    seen = f"Only {gib(free)} of {gib(total)} are free" + (f", and {gib(wanted)} {use}." if wanted else ".")
    if "allocation_bytes" in numbers and "requested_bytes" not in numbers:
        # Its size was given, and then vLLM does not look at the utilization.
        steps[0] = f"Set kv-cache-memory-bytes to at most {gib(free)}."
    if free < total / 2 and "allocation_bytes" not in numbers:
        seen += " Another process holds the rest."
        steps = [
            "End it (nvidia-smi names it); a server that died may still hold memory for a while.",
            f"Or set gpu-memory-utilization {limit}.",
        ]
    return seen, steps


def _no_cache(numbers: Numbers) -> tuple[str, list[str]]:
    left = numbers.get("available_bytes")
    seen = "Weights and one batch leave nothing for the KV cache" + ("." if left is None else f" ({gib(left)}).")
    wanted, total = numbers.get("requested_bytes"), numbers.get("total_bytes")
    more = "as far as memory allows"
    if left is not None and wanted is not None and total:
        more = f"to more than {math.ceil(100 * (wanted - left) / total) / 100:.2f}"
    return seen, [
        f"Raise gpu-memory-utilization {more}; or kv-cache-memory-bytes, where that is set.",
        "Lower max-num-batched-tokens and max-num-seqs: the batch that is tried out at the start becomes smaller.",
        "Take a quantized checkpoint, or raise tensor-parallel-size.",
    ]


def _small_cache(numbers: Numbers) -> tuple[str, list[str]]:
    asked, fits = numbers.get("max_model_len_tokens"), numbers.get("fitting_model_len_tokens")
    needed, left = numbers.get("needed_bytes"), numbers.get("available_bytes")
    if "fitting_num_seqs" in numbers:
        fitting = f"{numbers['fitting_num_seqs']:,.0f}"
        return f"There is room for {fitting} sequences.", [
            f"Set max-num-seqs to at most {fitting}.",
            "Or raise gpu-memory-utilization.",
            "Or use more GPUs.",
        ]
    seen = "The KV cache is too small for one request of full length."
    if asked is not None:
        seen = f"One request of {asked:,.0f} tokens does not fit into the KV cache"
        seen += "." if needed is None or left is None else f": it needs {gib(needed)}, and there are {gib(left)}."
    first = "Lower max-model-len."
    if fits is not None:
        seen += f" The longest request that fits has {fits:,.0f} tokens."
        first = f"Set max-model-len to at most {fits:,.0f}."
    return seen, [
        "Raise gpu-memory-utilization, if memory is free; or kv-cache-memory-bytes, where that is set.",
        first,
        "Lower max-num-seqs and max-num-batched-tokens: what a batch needs is missing from the cache.",
        "Take kv-cache-dtype fp8 or a quantized checkpoint.",
        "Raise tensor-parallel-size.",
    ]


def _graphs(numbers: Numbers) -> tuple[str, list[str]]:
    return "Capturing CUDA graphs needs memory beside what gpu-memory-utilization has given away" + _on_device(
        numbers
    ) + ".", [
        "Lower gpu-memory-utilization.",
        "Lower max-num-seqs or max-cudagraph-capture-size.",
        "Use enforce-eager, which is slower, or more GPUs.",
    ]


def _sampler(numbers: Numbers) -> tuple[str, list[str]]:
    seqs = numbers.get("max_num_seqs")
    below = "" if seqs is None else f" below {seqs:,.0f}"
    return "Sampling for so many sequences at once needs more memory than is left.", [
        f"Lower max-num-seqs{below}.",
        "Lower gpu-memory-utilization.",
        "Use more GPUs.",
    ]


def _runtime(numbers: Numbers) -> tuple[str, list[str]]:
    return "Memory ran out while serving: what gpu-memory-utilization leaves free was too little" + _on_device(
        numbers
    ) + ".", [
        "Lower gpu-memory-utilization.",
        "Lower max-num-batched-tokens and max-num-seqs.",
        "Use more GPUs.",
    ]


def _host(numbers: Numbers) -> tuple[str, list[str]]:
    wanted = numbers.get("allocation_bytes")
    seen = (
        "The system killed the server, or a process of it, most likely because the host's memory ran out (see dmesg)."
    )
    if wanted is not None:
        seen = f"The host's memory ran out: {gib(wanted)} more were asked for."
    return seen, [
        (
            "Lower what the server takes of it: cpu-offload-gb, kv-offloading-size, in old versions swap-space; on a "
            "CPU gpu-memory-utilization."
        ),
        "Raise the container's memory limit, or add memory.",
    ]


_MEMORY: dict[FailureKind, Callable[[Numbers], tuple[str, list[str]]]] = {
    "oom_weights": _weights,
    "oom_activation_profile": _profile,
    "oom_kv_cache_none": _no_cache,
    "oom_kv_cache_too_small": _small_cache,
    "oom_free_memory_lt_requested": _free,
    "oom_cudagraph_capture": _graphs,
    "oom_sampler_warmup": _sampler,
    "oom_runtime": _runtime,
    "host_oom_killed": _host,
}
_UNKNOWN = "This message is not known here: look around the quoted line in the server's log."
_PLAIN: dict[FailureKind, str] = {
    "invalid_argument": "vLLM refuses this value or this combination of values: correct what the line names.",
    "unsupported_feature": "This model, device or build of vLLM does not support it: leave the flag out, or take "
    "another value.",
    "version_mismatch": "vLLM, its libraries and the driver do not go together.",
    "model_not_found": "Correct serve.model or serve.revision, or download the model first; a private one needs "
    "HF_TOKEN.",
    "auth_gated_model": "Ask for access on the model's page, and export HF_TOKEN in the shell that starts the server.",
    "trust_remote_code_needed": "The model brings its own code. If you trust it: serve.allow_remote_code: true and "
    "serve.args.trust-remote-code: true.",
    "port_in_use": "Another program has the port: end it or take another port. In a sweep the trial is repeated on "
    "another one.",
    "gpu_busy_other_process": "Another process used the GPU meanwhile, perhaps the previous server on its way out: "
    "wait until "
    "its memory is back, then try again.",
    "nccl_or_distributed": "The GPUs could not talk to each other: look at NCCL's own messages (serve.env: "
    "{NCCL_DEBUG: WARN}).",
    "hang_timeout": "The engine stopped answering. If it does so again, these flags are at fault: lower max-num-seqs "
    "and "
    "max-num-batched-tokens.",
    "engine_dead": "The engine died without saying why: a crash in native code, or killed from outside (dmesg).",
    "client_404_model_name": "Ask for a name that /v1/models lists, or set served-model-name.",
    "client_401": "The server wants another API key than the one it was asked with.",
    "client_timeout": "The connection broke off, or an answer took too long, while the server lived.",
    "healthy": "Nothing in the log speaks of a failure.",
}
