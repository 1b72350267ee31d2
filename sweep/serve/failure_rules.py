"""The messages that vLLM fails with, and what each means for a sweep: one row for each.

Wordings are those of vLLM 0.4 to 0.32. A row that is added brings a log for it in tests/logs/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sweep.failure import FailureKind, Treatment

# A message may be the cause, a symptom whose cause lies in what was going on, a consequence, or only point to another.
CAUSE, SYMPTOM, CONSEQUENCE, WRAPPER = range(4)


@dataclass(frozen=True, slots=True)
class Rule:
    """A message and its meaning. Named groups of the pattern become bounds of the same name.

    flags: those that the message is about and does not name. any_level: the message counts in an INFO record as well.
    """

    kind: FailureKind
    treatment: Treatment
    pattern: re.Pattern[str]
    advice: str
    rank: int = CAUSE
    flags: tuple[str, ...] = ()
    any_level: bool = False


def _rule(
    kind: FailureKind,
    treatment: Treatment,
    pattern: str,
    advice: str,
    *,
    rank: int = CAUSE,
    flags: tuple[str, ...] = (),
    any_level: bool = False,
) -> Rule:
    return Rule(kind, treatment, re.compile(pattern), advice, rank, flags, any_level)


LESS_MEMORY = "Lower gpu-memory-utilization, max-num-seqs or max-num-batched-tokens."
_MORE_CACHE = "Raise gpu-memory-utilization, lower max-model-len, or use more GPUs."
WEIGHTS = "The weights do not fit: raise tensor-parallel-size, or take a quantized checkpoint or a smaller model."
_VALUE = "vLLM refuses this value or this combination of values."
_UTILIZATION = ("gpu-memory-utilization",)
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

_ARGPARSE = r"^(?:vllm(?: \w+)?|[\w-]+\.py): error: "

_WRAPPED = r"(?:Engine core initialization failed|Engine process failed to start|WorkerProc initialization failed)"

# Within a rank the first line of the log decides, and for one line the first rule.
RULES: tuple[Rule, ...] = (
    # Memory, in vLLM's own words.
    _rule(
        "oom_weights",
        "prune",
        r"Failed to load model - not enough GPU memory",
        WEIGHTS + " Ignore the advice to lower gpu-memory-utilization: it does not change what weights need.",
        flags=(*_PARALLEL, "quantization"),
    ),
    _rule(
        "oom_kv_cache_too_small",
        "prune",
        r"To serve at least one request with the models?'s max seq len \((?P<max_model_len_tokens>\d+)\), "
        r"\((?P<needed_gib>[\d.]+) GiB KV cach"
        r"(?:e is needed, which is larger than the available KV cache memory \((?P<available_gib>-?[\d.]+) GiB\))?"
        r"(?:.{0,40}the estimated maximum model length is (?P<fitting_model_len_tokens>\d+))?",
        _MORE_CACHE,
    ),
    _rule(
        "oom_kv_cache_too_small",
        "prune",
        r"max seq len \((?P<max_model_len_tokens>\d+)\) is larger than the maximum number of tokens that can be stored "
        r"in KV cache \((?P<fitting_model_len_tokens>\d+)\)",
        _MORE_CACHE,
    ),
    _rule(
        "oom_kv_cache_too_small",
        "prune",
        r"max_num_seqs \((?P<max_num_seqs>\d+)\) exceeds available Mamba cache blocks \((?P<fitting_num_seqs>\d+)\)"
        r"|Not enough memory for \d+ blocks of KV cache",
        "Lower max-num-seqs, or raise gpu-memory-utilization.",
    ),
    _rule(
        "oom_kv_cache_none",
        "prune",
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory"
        r"|frontend multimodal GPU decoding reserves [\d.]+ GiB",
        _MORE_CACHE,
    ),
    # One sentence of the CPU backend with two meanings: what is asked for is negative when the share of memory does not
    # even cover the process itself, and too much when it is positive.
    _rule(
        "oom_kv_cache_none",
        "prune",
        r"on kv cache allocation is less than requested memory for kv \((?P<requested_gib>-[\d.]+|0\.0)\b",
        "Raise gpu-memory-utilization: on a CPU it is the share of RAM, and this one does not cover vLLM itself.",
        flags=_UTILIZATION,
    ),
    _rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"Available memory on node \d+ \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on kv cache allocation is "
        r"less than requested memory for kv \((?P<requested_gib>[\d.]+)",
        "Lower gpu-memory-utilization or kv-cache-memory-bytes: on a CPU it is the share of RAM, and less is free.",
        flags=(*_UTILIZATION, "kv-cache-memory-bytes"),
    ),
    _rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"(?:Free|Available) memory on (?:device|node)[^(]{0,20}\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on "
        r"startup is less than desired [GC]PU memory utilization \((?P<utilization_frac>[\d.]+), "
        r"(?P<requested_gib>[\d.]+) GiB\)",
        "Lower gpu-memory-utilization below what is free.",
        flags=_UTILIZATION,
    ),
    _rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"Externally held weights on device .{0,200}exceed the desired|less than the engine's budget after excluding",
        "Lower gpu-memory-utilization below what is free.",
        flags=_UTILIZATION,
    ),
    _rule(
        "oom_sampler_warmup",
        "prune",
        r"out of memory occurred when warming up (?:sampler|pooler).{0,60}with (?P<max_num_seqs>\d+) dummy requests",
        "Lower max-num-seqs, or gpu-memory-utilization.",
    ),
    # The machine.
    _rule(
        "gpu_busy_other_process",
        "retry",
        r"Error in memory profiling|CUDA-capable device\(s\) is/are busy or unavailable",
        "Another process used the GPU meanwhile, perhaps the previous server on its way out.",
    ),
    _rule(
        "port_in_use",
        "retry",
        r"\[Errno 98\].*[Aa]ddress already in use|Could not find open port after|EADDRINUSE",
        "Another program took the port. The trial is repeated on another one.",
    ),
    _rule(
        "host_oom_killed",
        "prune",
        r"^Killed$",  # written by the shell that started it
        "The kernel killed the server: lower what it takes of the host's memory, or add some.",
        rank=CONSEQUENCE,
    ),
    _rule(
        "host_oom_killed",
        "prune",
        r"died unexpectedly \(exit code: -9\)|Failed core proc\(s\): \{[^}]*: -9\b|died with exit code -9",
        "The kernel killed a process of the server: lower what it takes of the host's memory, or add some.",
        rank=SYMPTOM,
    ),
    # The model.
    _rule(
        "auth_gated_model",
        "abort_sweep",
        r"gated repo|GatedRepoError|401 Client Error|403 Client Error|Invalid username or password",
        "Ask for access on the model's page, and export HF_TOKEN in the shell that starts the sweep.",
    ),
    _rule(
        "trust_remote_code_needed",
        "abort_sweep",
        r"requires you to execute the (?:configuration|modeling) file|contains custom code which must be executed"
        r"|pass the argument `trust_remote_code=True`",
        "The model brings its own code. If you trust it: serve.allow_remote_code: true and "
        "serve.args.trust-remote-code: true.",
    ),
    _rule(
        "model_not_found",
        "abort_sweep",
        r"Invalid repository ID or local directory|Repo id must be in the form|LocalEntryNotFoundError"
        r"|RepositoryNotFoundError|RevisionNotFoundError|Cannot find any model weights|404 Client Error",
        "Correct serve.model or serve.revision, or download the model first.",
    ),
    # Versions.
    _rule(
        "version_mismatch",
        "abort_sweep",
        r"No module named '?vllm\b",
        "There is no vLLM in the environment of serve.command: install it there, or name another program.",
    ),
    _rule(
        "version_mismatch",
        "abort_sweep",
        r"undefined symbol|no kernel image is available|NVIDIA driver on your system is too old"
        r"|driver version is insufficient|does not recognize this architecture|Failed to infer device type"
        r"|forward compatibility was attempted",
        "vLLM, torch, transformers and the driver do not go together: see that this vLLM serves this model by hand.",
    ),
    _rule(
        "other",
        "abort_sweep",
        r"Failed to import Ray",
        "Install Ray beside vLLM, or use distributed-executor-backend: mp.",
        flags=("distributed-executor-backend",),
    ),
    _rule(
        "other",
        "abort_sweep",
        r"cannot find -lcuda|fatal error: Python\.h: No such file",
        "A compiler that vLLM starts lacks a file: install the CUDA stubs, or Python's headers (python3-dev).",
    ),
    # What cannot be served with these flags.
    _rule(
        "unsupported_feature",
        "prune",
        r"not supported for the current GPU|not supported in this architecture"
        r"|is not supported for this model|is not valid for this configuration\. Reason"
        r"|Number of experts in the model must be greater than 0|does not (?:yet )?support:"
        r"|Bfloat16 is only supported on GPUs|Unknown quantization method|are not supported for now",
        "This GPU, model or version of vLLM does not support it.",
    ),
    _rule(
        "unsupported_feature",
        "abort_sweep",
        r"out of resource: shared memory",
        "A kernel for this quantization is too large for this GPU: take another checkpoint, or a newer vLLM.",
        flags=("quantization", "kv-cache-dtype", "attention-backend"),
    ),
    # Arguments.
    _rule(
        "version_mismatch",
        "abort_sweep",
        _ARGPARSE + r"unrecognized arguments: .*--shutdown-timeout",
        "This vLLM is too old: vllm-sweep needs one that knows --shutdown-timeout (0.18 or newer).",
    ),
    _rule(
        "invalid_argument",
        "abort_sweep",
        _ARGPARSE + r"(?:unrecognized arguments|ambiguous option)",
        "This version of vLLM does not know the flag: correct its name, or leave it out.",
    ),
    _rule("invalid_argument", "prune", _ARGPARSE, _VALUE),
    _rule(
        "invalid_argument",
        "prune",
        r"World size \((?P<world_size>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "Use no more GPUs than there are.",
        flags=_PARALLEL,
    ),
    _rule(
        "invalid_argument",
        "prune",
        r"must be divisible by tensor parallel size",
        "Take a tensor-parallel-size that divides the number of attention heads.",
        flags=_PARALLEL,
    ),
    _rule(
        "invalid_argument",
        "prune",
        r"^(?:ValueError: |RuntimeError: )?(?:max_num_batched_tokens|max_num_seqs|max_num_active_seqs"
        r"|long_prefill_token_threshold|max_cpu_loras|User-specified max_model_len|Invalid prefix_match_unit"
        r"|Unsupported block size)\b"
        r"|needs \d+-token kernel blocks|No valid attention backend found",
        _VALUE,
    ),
    _rule(
        "invalid_argument",
        "prune",
        r"Quantization method specified in the model config|Cannot find the config file for \w+",
        "Leave quantization out for a quantized checkpoint, or take one that has been quantized that way.",
        flags=("quantization",),
    ),
    _rule("invalid_argument", "prune", r"^[\w.-]{1,60}: Input should be ", _VALUE),
    _rule("invalid_argument", "prune", r"^Value error, ", _VALUE, rank=SYMPTOM),
    # Communication and hangs.
    _rule(
        "nccl_or_distributed",
        "abort_sweep",
        r"\bNCCL error\b|NCCL_ERROR_|NCCL WARN|DistBackendError|DistNetworkError|DistStoreError",
        "The GPUs could not talk to each other: look at NCCL's own messages (serve.env: {NCCL_DEBUG: WARN}).",
        rank=SYMPTOM,
        flags=_PARALLEL,
    ),
    _rule(
        "nccl_or_distributed",
        "prune",
        r"Cannot provide a placement group requiring",
        "Ray has fewer GPUs than this asks for.",
        flags=_PARALLEL,
    ),
    _rule(
        "hang_timeout",
        "retry",
        r"RPC call to \w+ timed out|Timed out waiting for engine|Did not receive response from front-end process",
        "The engine stopped answering. If it does so again, these flags are at fault.",
        rank=SYMPTOM,
    ),
    # The client's side.
    _rule(
        "client_404_model_name",
        "abort_sweep",
        r"The model `[^`]{1,300}` does not exist|Initial test run failed.*Not Found",
        "Ask for a name that /v1/models lists.",
        any_level=True,
    ),
    _rule(
        "client_401",
        "abort_sweep",
        r'^HTTP/1\.1 401|\{"error": ?"Unauthorized"\}',
        "The server wants another API key than the one it was asked with.",
    ),
    _rule(
        "client_timeout",
        "retry",
        r"ServerDisconnectedError|^(?:asyncio\.)?TimeoutError: *$",
        "The connection broke off while the server lived.",
        rank=CONSEQUENCE,
    ),
    # Out of memory in torch's words, which do not say during what.
    _rule(
        "oom_runtime",
        "prune",
        r"^(?:torch\.)?(?:cuda\.)?OutOfMemoryError\b|^RuntimeError: CUDA error: out of memory"
        r"|^torch\.AcceleratorError: CUDA error: out of memory|(?:CUDA|HIP|XPU) out of memory\. Tried to allocate"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        LESS_MEMORY,
        rank=SYMPTOM,
    ),
    _rule(
        "other",
        "fail_trial",
        r"illegal memory access|unspecified launch failure",
        "A kernel failed. If it does so again with these flags, leave them out.",
        rank=SYMPTOM,
    ),
    _rule(
        "other",
        "retry",
        r"uncorrectable ECC|Memory access fault by GPU|HW Exception by GPU",
        "The hardware or its driver failed: look at the driver's log (dmesg).",
        rank=SYMPTOM,
    ),
    # Consequences, for logs that say nothing better.
    _rule(
        "engine_dead",
        "fail_trial",
        r"EngineDeadError|MQLLMEngine is already dead|Engine process \(pid \d+\) died|Background loop has errored",
        "The engine died without saying why: a crash in native code, or killed from outside (dmesg).",
        rank=CONSEQUENCE,
    ),
    _rule(
        "other",
        "fail_trial",
        rf"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)\b(?:: (?!{_WRAPPED})|$)|died, exit code: -15",
        "This error is not known here: look around the quoted line in server.log.",
        rank=CONSEQUENCE,
    ),
    _rule(
        "other",
        "fail_trial",
        rf"{_WRAPPED}|The actor died unexpectedly|EngineCore failed to start",
        "The log does not say the cause in words that are known here: look above the quoted line in server.log.",
        rank=WRAPPER,
    ),
)
