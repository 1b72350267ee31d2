"""The messages of vLLM, torch and the kernel that say that memory ran out."""

from __future__ import annotations

from sweep.serve.rule import CONSEQUENCE, SYMPTOM, rule

UTILIZATION = ("gpu-memory-utilization",)
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

MEMORY_RULES = (
    rule(
        "oom_weights",
        "prune",
        r"Failed to load model - not enough GPU memory",
        flags=(*PARALLEL, "quantization"),
    ),
    rule(
        "oom_kv_cache_too_small",
        "prune",
        r"To serve at least one request with the models?'s max seq len \((?P<max_model_len_tokens>[\d,]+)\), "
        r"\((?P<needed_gib>[\d.]+) Gi?B KV cach"
        r"(?:e is needed, which is larger than the available KV cache memory \((?P<available_gib>-?[\d.]+) Gi?B\))?"
        r"(?:.{0,40}the estimated maximum model length is (?P<fitting_model_len_tokens>[\d,]+))?",
    ),
    rule(
        "oom_kv_cache_too_small",
        "prune",
        r"max seq len \((?P<max_model_len_tokens>[\d,]+)\) is larger than the maximum number of tokens that can be "
        r"stored in KV cache(?: \((?P<fitting_model_len_tokens>[\d,]+)\))?",
    ),
    rule("oom_kv_cache_too_small", "prune", r"To serve at least one request with the models?'s max seq len"),
    rule(
        "oom_kv_cache_too_small",
        "prune",
        r"max_num_seqs \((?P<max_num_seqs>\d+)\) exceeds available Mamba cache blocks \((?P<fitting_num_seqs>\d+)\)"
        r"|Not enough memory for \d+ blocks of KV cache|not enough KV cache space|KV cache is too small to",
    ),
    rule(
        "oom_kv_cache_none",
        "prune",
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory"
        r"|frontend multimodal GPU decoding reserves [\d.]+ GiB.{0,200}only (?P<available_gib>-?[\d.]+) GiB"
        r"|frontend multimodal GPU decoding reserves",
    ),
    # One sentence of the CPU backend with two meanings: what is asked for is negative when the share of memory does not
    # even cover the process itself, and too much when it is positive.
    rule(
        "oom_kv_cache_none",
        "prune",
        r"(?:\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) )?on kv cache allocation is less than requested memory "
        r"for kv \((?P<available_gib>-[\d.]+|0(?:\.0+)?(?![\d.]))(?:/(?P<requested_gib>[\d.]+))? GiB",
        "On a CPU gpu-memory-utilization is the share of RAM, and this one does not cover vLLM itself: raise it.",
        flags=UTILIZATION,
    ),
    rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"(?:\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) )?on kv cache allocation is less than requested memory "
        r"for kv \((?P<allocation_gib>[\d.]+)(?:/(?P<requested_gib>[\d.]+))?",
        flags=(*UTILIZATION, "kv-cache-memory-bytes"),
    ),
    rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"(?:Free|Available) memory on (?:device|node)[^(]{0,40}\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on "
        r"startup is less than (?:desired [GC]PU memory utilization|the engine's budget[^(]{0,80}) "
        r"\((?P<utilization_frac>[\d.]+), (?P<requested_gib>[\d.]+) GiB\)"
        r"|is less than desired [GC]PU memory utilization|less than the engine's budget after excluding",
        flags=UTILIZATION,
    ),
    rule(
        "oom_free_memory_lt_requested",
        "prune",
        r"Externally held weights on device .{0,200}exceed the desired",
        "Weights that another process holds do not fit into this share: raise gpu-memory-utilization, or hold less.",
        flags=UTILIZATION,
    ),
    rule(
        "oom_sampler_warmup",
        "prune",
        r"out of memory occurred when warming up (?:sampler"
        r"|pooler)(?:.{0,60}with (?P<max_num_seqs>\d+) dummy requests)?",
    ),
    # What a shell, a container's engine, systemd or the kernel says of a process that was killed for memory.
    rule(
        "host_oom_killed",
        "prune",
        r"Out of memory: Kill(?:ed)? process|[Mm]emory cgroup out of memory|oom-kill:constraint=|invoked oom-killer"
        r"|OOMKilled|killed by the OOM killer\.|Failed with result 'oom-kill'|node running low on memory"
        r"|ray\.exceptions\.OutOfMemoryError|low on memory\. Ray killed"
        r"|oom_kill event|been OOM Killed|low on resource: memory|srun: error: .{1,80}: Out Of Memory",
        any_level=True,
    ),
    rule(
        "host_oom_killed",
        "prune",
        r"DefaultCPUAllocator: (?:can't allocate"
        r"|not enough) memory(?:: you tried to allocate (?P<allocation_bytes>\d+))?"
        r"|^(?:numpy\.[\w.]+)?_?(?:Array)?MemoryError\b|std::bad_alloc|\[Errno 12\] Cannot allocate memory"
        r"|unable to mmap \d+ bytes",
        "The host's own memory ran out: lower swap-space, cpu-offload-gb and max-num-seqs, or add memory.",
        rank=SYMPTOM,
    ),
    rule(
        "host_oom_killed",
        "prune",
        r"died unexpectedly \(exit code: -9\)|Failed core proc\(s\): \{[^}]{0,200}: -9\b|died with exit code -9"
        r"|died, exit code: -9\b",
        rank=SYMPTOM,
    ),
    rule(
        "host_oom_killed",
        "prune",
        # Written by the shell that started it, or by the container's engine.
        r"^Killed$|: line \d+: +\d+ Killed\b|with (?:exit )?code 137\b|code=killed, status=9/KILL",
        words=("Killed", "with code 137", "with exit code 137", "code=killed, status=9/KILL"),
        rank=CONSEQUENCE,
    ),
    # Out of memory in torch's and the driver's words, which do not say during what.
    rule(
        "oom_runtime",
        "prune",
        r"^(?:[\w.]{1,120}[.(])?OutOfMemoryError\b|^(?:RuntimeError"
        r"|torch\.AcceleratorError)\W{1,3}CUDA (?:driver )?error: out "
        r"of memory|(?:CUDA|HIP|XPU|NPU|HPU|MPS|MLU|MUSA)(?: backend)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUDA(?: driver)? error: out of memory|HIP error: out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|Cuda failure '?out of memory|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"
        r"|CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)|Ran out of memory in memory space"
        r"|RESOURCE_EXHAUSTED: .{0,200}(?:memory|allocat)"
        r"|Triton Error \[(?:CUDA|HIP)\]: out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        rank=SYMPTOM,
    ),
)
