"""The messages that blame the machine: its ports, drivers, libraries, links, and the processes on it."""

from __future__ import annotations

from sweep.serve.memory_rules import PARALLEL
from sweep.serve.rule import CONSEQUENCE, SYMPTOM, rule

_LIBRARIES = (
    "vLLM, torch, transformers and the driver do not go together: install the versions that this vLLM was built for, "
    "and see by hand that it serves this model."
)
_SYSTEM = (
    "The disk, /dev/shm or a limit of this system is in the way: free some space (in Docker: --ipc=host or a larger "
    "--shm-size), raise `ulimit -n`, or mend the permissions."
)
_CRASH = "A kernel or native code failed. If it does so again with these flags, leave them out."

MACHINE_RULES = (
    rule(
        "gpu_busy_other_process",
        "retry",
        r"Error in memory profiling(?:.{0,20}Initial free memory (?P<free_gib>[\d.]+) GiB)?"
        r"|busy or unavailable",
    ),
    rule(
        "port_in_use",
        "retry",
        r"[Aa]ddress already in use|Could not find open port|EADDRINUSE|error while attempting to bind on address"
        r"|Only one usage of each socket address|\bport \d+ is already (?:in use|allocated)|port is already allocated",
    ),
    rule(
        "other",
        "abort_sweep",
        r"\[Errno 99\]|[Cc]annot assign requested address",
        "This machine does not have the address of --host: leave host out.",
    ),
    # Versions and drivers.
    rule(
        "version_mismatch",
        "abort_sweep",
        r"No module named '?vllm(?:'|\s|$|\.entrypoints)|vllm: command not found",
        "There is no working vLLM in the environment of serve.command: install it there, or name another program.",
    ),
    rule(
        "version_mismatch",
        "abort_sweep",
        r"no kernel image is available|NVIDIA driver on your system is too old"
        r"|driver version is insufficient|does not recognize this architecture"
        r"|forward compatibility was attempted|compiled with an unsupported toolchain|device kernel image is invalid"
        r"|unsupported display driver / cuda driver|Torch not compiled with CUDA enabled"
        r"|CUDA error: invalid device func"
        r"|version `GLIBC(?:XX)?_|is not defined for option 'gpu-name'"
        r"|ImportError: cannot import name"
        r"|is already used by a Transformers config|all_special_tokens_extended"
        r"|requires compute capability .{0,20} to run\b|Illegal instruction",
        _LIBRARIES,
    ),
    # Libraries that nobody needs complain like this at every start.
    rule(
        "version_mismatch",
        "abort_sweep",
        r"undefined symbol|cannot open shared object file|compiled using NumPy 1\.x|VersionConflict"
        r"|is required for a normal functioning of this module",
        _LIBRARIES,
        doubtful=True,
    ),
    rule(
        "version_mismatch",
        "abort_sweep",
        r"[Ee]xec format error",
        "The program was built for another kind of processor: take the image, or the build, for this one.",
    ),
    rule(
        "other",
        "abort_sweep",
        r"Failed to infer device type|No CUDA GPUs are available|No HIP GPUs are available|Found no NVIDIA driver"
        r"|no CUDA-capable device is detected|libcuda\.so\.1: cannot open|NVMLError_(?:LibraryNotFound|DriverNotLoaded)"
        r"|could not select device driver|nvidia-container-cli: \w+ error|Device string must not be empty",
        "vLLM finds no device that this build can use: see that nvidia-smi (or rocm-smi) works where the server runs, "
        "and that this vLLM was built for this kind of device.",
    ),
    rule(
        "version_mismatch",
        "abort_sweep",
        r"Failed to import from vllm\._C|Failed to import from vllm\._rocm_C",
        _LIBRARIES,
        any_level=True,
        doubtful=True,
    ),
    rule(
        "other",
        "abort_sweep",
        r"Failed to import Ray|Ray is not installed|No module named 'ray'|requires installation of ray"
        r"|Ray version .{1,20} is required"
        r"|Ray Compiled Graph is not installed",
        "Install Ray beside vLLM, or use distributed-executor-backend: mp.",
        flags=("distributed-executor-backend",),
    ),
    rule(
        "other",
        "abort_sweep",
        r"cannot find -lcuda|fatal error: [\w./]+\.h: No such file|Failed to find C compiler|Could not find nvcc"
        r"|No such file or directory: '?(?:gcc|g\+\+|cc|nvcc|ninja)\b|CUDA_HOME environment variable is not set"
        r"|Could not find CUDA installation|nvcc fatal|[Nn]inja build failed|ninja: build stopped",
        "A compiler that vLLM starts is missing, lacks a file or is of another version: install gcc, Python's headers "
        "(python3-dev) and the CUDA toolkit that this torch was built with.",
    ),
    rule(
        "nccl_or_distributed",
        "abort_sweep",
        r"NCCL WARN .{0,300}(?:shared memory|No space left on device)",
        "NCCL finds too little room in /dev/shm: give it more room (in Docker: --ipc=host, or a larger --shm-size).",
    ),
    rule(
        "other",
        "abort_sweep",
        r"unable to open shared memory object|can't start new thread|pthread_create failed"
        r"|Cannot re-initialize CUDA in forked subprocess|finished its bootstrapping phase"
        r"|insufficient shared memory|\[Errno 24\]",
        _SYSTEM,
    ),
    # Whoever writes statistics or a log meets this, and the server goes on.
    rule(
        "other",
        "abort_sweep",
        r"No space left on device|Disk quota exceeded|Read-only file system|PermissionError: \[Errno 13?\]",
        _SYSTEM,
        doubtful=True,
    ),
    # Hardware and kernels.
    rule(
        "other",
        "abort_sweep",
        r"uncorrectable ECC|Memory access fault by GPU|HW Exception by GPU|NVRM: Xid|fallen off the bus|GPU is lost"
        r"|CUDA error: unknown error|CUDA unknown error|system not yet initialized|HSA_STATUS_ERROR_(?!OUT_OF)",
        "The device or its driver failed: look at the driver's log (dmesg), and reset the GPU if it does so again.",
        rank=SYMPTOM,
    ),
    rule(
        "other",
        "fail_trial",
        r"illegal memory access|unspecified launch failure|device-side assert triggered|misaligned address"
        r"|CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED|NOT_SUPPORTED|INVALID_VALUE)"
        r"|Segmentation fault|Segfault encountered|Fatal Python error|Aborted +\(core dumped\)|CUDA error: an illegal"
        r"|Bus error|double free or corruption|malloc\(\): |corrupted size vs|stack smashing detected",
        _CRASH,
        rank=SYMPTOM,
    ),
    rule(
        "other",
        "fail_trial",
        r"^terminate called (?:after|without)|\bpanicked at |(?:exited|terminated) with (?:exit )?code 13[4-69]\b",
        _CRASH,
        words=("terminate called ", "panicked at ", "with code 13", "with exit code 13"),
        rank=CONSEQUENCE,
    ),
    # Said by what runs the server.
    rule(
        "other",
        "retry",
        r"CANCELLED AT .{1,40} DUE TO|(?:exited|terminated) with (?:exit )?code 1(?:30|43)\b",
        "Somebody stopped the server from outside.",
        words=("CANCELLED AT ", "with code 1", "with exit code 1"),
        rank=CONSEQUENCE,
    ),
    rule(
        "other",
        "abort_sweep",
        r"^docker: Error response from daemon: ",
        "Docker did not start the container: correct what the line names.",
        rank=CONSEQUENCE,
    ),
    rule(
        "version_mismatch",
        "abort_sweep",
        r"died unexpectedly \(exit code: -4\)|Failed core proc\(s\): \{[^}]{0,200}: -4\b|died with exit code -4\b",
        "This build uses instructions that the processor does not have: install a build for this CPU.",
        rank=SYMPTOM,
    ),
    # Communication and hangs.
    rule(
        "nccl_or_distributed",
        "prune",
        r"Cannot provide a placement group(?: requiring (?P<world_size>\d+))?"
        r"|number of required \w+ exceeds the total number of available|has no GPU available\. current_node_resource"
        r"|Current node has no GPU available|ray\.exceptions\.\w*PlacementGroup\w*|No available node types can fulfill"
        r"|Not enough resources to allocate \d+ (?:DP ranks|placement groups)|You don't have enough GPUs available",
        "Ray has fewer free GPUs than this asks for: use no more than `ray status` shows, and end what still holds "
        "some.",
        flags=PARALLEL,
    ),
    rule(
        "nccl_or_distributed",
        "abort_sweep",
        r"\b[NR]CCL error\b|NCCL_ERROR_|DistBackendError|DistNetworkError|DistStoreError|nccl(?:Unhandled|Internal"
        r"|System"
        r"|Remote|Invalid)\w*Error|ncclInvalidUsage|connectFullMesh failed"
        r"|peer access is not supported|client socket has timed out|Gloo connect|HCCL error|ncclCommInitRank"
        r"|\[\S{0,60}gloo/transport/\S{1,80}\]|Duplicate GPU detected",
        words=(
            "CCL error",
            "NCCL_ERROR_",
            "DistBackendError",
            "DistNetworkError",
            "DistStoreError",
            "nccl",
            "connectFullMesh failed",
            "peer access is not supported",
            "client socket has timed out",
            "gloo/transport",
            "Gloo connect",
            "Duplicate GPU detected",
        ),
        rank=SYMPTOM,
        flags=PARALLEL,
    ),
    # The others wait in vain for one that has failed, and may say so before it does.
    rule(
        "nccl_or_distributed",
        "abort_sweep",
        r"NCCL WARN|caught collective operation timeout",
        rank=SYMPTOM,
        flags=PARALLEL,
        doubtful=True,
    ),
    rule(
        "hang_timeout",
        "retry",
        r"RPC call to \w+ timed out|Timed out waiting for (?:new )?engine"
        r"|Did not receive response from front-end process"
        r"|Engine iteration timed out|RPC Server not ready|No heartbeat received from|did not become (?:ready"
        r"|healthy)|(?:execute_model|sample_tokens) timed out"
        r"|failed to report ZMQ addresses within|Engine core .{0,60}did not (?:start|respond)"
        r"|timed out waiting for the engine",
        rank=SYMPTOM,
    ),
)
