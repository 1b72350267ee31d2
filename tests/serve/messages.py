"""One message or more for every rule: the kind, what a sweep does, and the lines as they stand in a log."""

from __future__ import annotations

from sweep.failure import FailureKind, Treatment

MESSAGES: tuple[tuple[FailureKind, Treatment, str], ...] = (
    # Memory.
    (
        "oom_weights",
        "prune",
        "ERROR 01-02 03:04:05 [gpu_model_runner.py:9] Failed to load model - not enough GPU memory.",
    ),
    (
        "oom_weights",
        "prune",
        (
            "(EngineCore pid=9) INFO 01-02 03:04:05 [runner.py:9] Starting to load model example/chat-70b...\n"
            "(EngineCore pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB."
        ),
    ),
    (
        "oom_activation_profile",
        "prune",
        (
            "INFO 01-02 03:04:05 model_runner.py:9] Loading model weights took 13.2 GB\n"
            "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB "
            "(GPU 0; 23.69 GiB total capacity; 14.01 GiB already allocated; 8.10 GiB free; 14.2 GiB reserved)"
        ),
    ),
    (
        "oom_activation_profile",
        "prune",
        (
            "ERROR 01-02 03:04:05 [core.py:9] Traceback (most recent call last):\n"
            "ERROR 01-02 03:04:05 [core.py:9]     self._initialize_kv_caches(vllm_config)\n"
            "ERROR 01-02 03:04:05 [core.py:9]     self.model_runner.profile_run()\n"
            "ERROR 01-02 03:04:05 [core.py:9] RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate`"
        ),
    ),
    (
        "oom_kv_cache_none",
        "prune",
        (
            "INFO 01-02 03:04:05 [gpu_worker.py:9] Available KV cache memory: -0.50 GiB\n"
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
        ),
    ),
    (
        "oom_kv_cache_none",
        "prune",
        "ValueError: frontend multimodal GPU decoding reserves 5.0 GiB (4.0 GiB raw), but only 2.5 GiB is available",
    ),
    (
        "oom_kv_cache_too_small",
        "prune",
        (
            "ValueError: The model's max seq len (16384) is larger than the maximum number of tokens that can be "
            "stored in KV cache (5120). Try increasing `gpu_memory_utilization`"
        ),
    ),
    (
        "oom_kv_cache_too_small",
        "prune",
        "ValueError: To serve at least one request with the models's max seq len, more",
    ),
    (
        "oom_kv_cache_too_small",
        "prune",
        "ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (300). Each decode sequence requires one.",
    ),
    (
        "oom_free_memory_lt_requested",
        "prune",
        (
            "ValueError: Externally held weights on device cuda:0 (14.0/23.6 GiB) exceed the desired GPU memory "
            "utilization"
        ),
    ),
    (
        "oom_free_memory_lt_requested",
        "prune",
        (
            "Traceback (most recent call last):\n"
            '  File "/srv/vllm/v1/worker/gpu_model_runner.py", line 7, in _allocate_kv_cache_tensors\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
        ),
    ),
    (
        "oom_sampler_warmup",
        "prune",
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 768 dummy requests. Please try "
            "lowering"
        ),
    ),
    (
        "oom_cudagraph_capture",
        "prune",
        (
            "(Worker_TP0 pid=9) ERROR 01-02 03:04:05 [multiproc_executor.py:9] WorkerProc hit an exception.\n"
            "(Worker_TP0 pid=9) ERROR 01-02 03:04:05 [executor.py:9] torch.OutOfMemoryError: CUDA out of memory."
        ),
    ),
    (
        "oom_runtime",
        "prune",
        (
            "ERROR 01-02 03:04:05 [engine.py:9] OutOfMemoryError('HIP out of memory. Tried to allocate 1.50 GiB.')\n"
            "CRITICAL 01-02 03:04:05 [launcher.py:9] MQLLMEngine is already dead, terminating server process"
        ),
    ),
    ("host_oom_killed", "prune", "Nov 30 01:02:03 node-1 kernel: Out of memory: Killed process 77 (VLLM::EngineCor)"),
    (
        "host_oom_killed",
        "prune",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to",
    ),
    (
        "host_oom_killed",
        "prune",
        "ERROR 01-02 03:04:05 [utils.py:9] Process ApiServer_1 (PID: 7) died with exit code -9",
    ),
    ("host_oom_killed", "prune", "./start.sh: line 9:  71 Killed                  vllm serve example/chat-7b"),
    # The machine.
    (
        "gpu_busy_other_process",
        "retry",
        "AssertionError: Error in memory profiling. Initial free memory 58.2 GiB, current",
    ),
    ("gpu_busy_other_process", "retry", "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ("port_in_use", "retry", "OSError: [Errno 98] Address already in use"),
    ("port_in_use", "retry", "RuntimeError: The server socket has failed to listen. code: -98, name: EADDRINUSE"),
    ("other", "abort_sweep", "OSError: [Errno 99] Cannot assign requested address"),
    ("version_mismatch", "abort_sweep", "/usr/bin/python3: No module named vllm"),
    ("version_mismatch", "abort_sweep", "ImportError: /srv/vllm/_C.abi3.so: undefined symbol: _ZN3c10"),
    (
        "version_mismatch",
        "abort_sweep",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    (
        "version_mismatch",
        "abort_sweep",
        "WARNING 01-02 03:04:05 _custom_ops.py:9] Failed to import from vllm._C with ImportError('libcudart.so.12')",
    ),
    (
        "version_mismatch",
        "abort_sweep",
        "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm",
    ),
    ("version_mismatch", "abort_sweep", "ERROR 01-02 03:04:05 [a.py:9] Failed core proc(s): {'EngineCore': -4}"),
    ("other", "abort_sweep", "RuntimeError: Failed to infer device type, please set the environment variable"),
    ("other", "abort_sweep", "ImportError: Ray is not installed. Please install Ray to use multi-node serving."),
    ("other", "abort_sweep", "main.c:5:10: fatal error: Python.h: No such file or directory"),
    ("other", "abort_sweep", "OSError: [Errno 28] No space left on device: '/home/user/.cache/vllm'"),
    ("other", "abort_sweep", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("other", "fail_trial", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    (
        "nccl_or_distributed",
        "abort_sweep",
        "node-1:7:9 [0] NCCL WARN Error while creating shared memory segment /dev/shm/x",
    ),
    (
        "nccl_or_distributed",
        "prune",
        "ValueError: Cannot provide a placement group requiring 8 GPUs within 1800 seconds.",
    ),
    ("nccl_or_distributed", "abort_sweep", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:9"),
    ("nccl_or_distributed", "abort_sweep", "misc/ibvwrap.cc:9 NCCL WARN Call to ibv_reg_mr failed"),
    ("hang_timeout", "retry", "TimeoutError: RPC call to execute_model timed out."),
    (
        "other",
        "abort_sweep",
        "ImportError: Please install bitsandbytes>=0.46.1 via `pip install bitsandbytes` to use this quantizer.",
    ),
    # The model.
    ("auth_gated_model", "abort_sweep", "OSError: You are trying to access a gated repo."),
    (
        "auth_gated_model",
        "abort_sweep",
        "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://hub.test/x",
    ),
    (
        "trust_remote_code_needed",
        "abort_sweep",
        "Please pass the argument `trust_remote_code=True` to allow custom code.",
    ),
    (
        "model_not_found",
        "retry",
        "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://hub.test",
    ),
    (
        "model_not_found",
        "abort_sweep",
        "OSError: example/no-such is not a local folder and is not a valid model identifier",
    ),
    ("model_not_found", "abort_sweep", "Value error, Invalid repository ID or local directory specified: 'example/x'."),
    # What cannot be served.
    (
        "unsupported_feature",
        "abort_sweep",
        "Value error, Model architectures ['NewForCausalLM'] are not supported for now.",
    ),
    (
        "unsupported_feature",
        "abort_sweep",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9",
    ),
    (
        "invalid_argument",
        "prune",
        (
            "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(block_size=8). "
            "Reasons: {FLASH_ATTN: [block_size not supported]}."
        ),
    ),
    ("unsupported_feature", "prune", "ValueError: The quantization method awq is not supported for the current GPU."),
    ("unsupported_feature", "prune", "Value error, Async scheduling is not compatible with pooling models."),
    ("unsupported_feature", "prune", "NotImplementedError: ('UnquantizedFusedMoE', 'sleep')"),
    # Arguments.
    ("version_mismatch", "abort_sweep", "vllm: error: unrecognized arguments: --shutdown-timeout 5"),
    (
        "invalid_argument",
        "abort_sweep",
        "api_server.py: error: ambiguous option: --device could match --device-ids, --dtype",
    ),
    (
        "invalid_argument",
        "prune",
        "vllm serve: error: argument --dtype: invalid choice: 'f8' (choose from 'auto', 'half')",
    ),
    (
        "invalid_argument",
        "prune",
        "Value error, World size (8) is larger than the number of available GPUs (2) in this node.",
    ),
    (
        "invalid_argument",
        "prune",
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (3).",
    ),
    ("invalid_argument", "prune", "AssertionError: 151643 is not divisible by 2"),
    (
        "invalid_argument",
        "prune",
        (
            "Value error, User-specified max_model_len (9000) is greater than the derived max_model_len "
            "(max_position_embeddings=4096 or model_max_length=None in model's config.json)."
        ),
    ),
    (
        "invalid_argument",
        "prune",
        "ValueError: max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128).",
    ),
    ("invalid_argument", "prune", "ValueError: No common block size for 33 (CPU_ATTN: [MultipleOf(32)])."),
    ("engine_dead", "fail_trial", "EngineCore encountered a fatal error."),
    ("other", "abort_sweep", "nvcc fatal   : Unknown option '-compress-mode=size'"),
    (
        "oom_runtime",
        "prune",
        (
            "INFO:     Application startup complete.\n"
            "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources."
        ),
    ),
    # What runs the server says.
    ("host_oom_killed", "prune", "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0."),
    ("host_oom_killed", "prune", "srun: error: node-1: task 0: Out Of Memory"),
    ("host_oom_killed", "prune", "The node was low on resource: memory. Container vllm was using 20Gi"),
    ("host_oom_killed", "prune", "command terminated with exit code 137"),
    ("other", "retry", "command terminated with exit code 143"),
    ("other", "retry", "slurmstepd: error: *** JOB 5 ON node-1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"),
    ("other", "fail_trial", "[error]worker exited with exit code 136"),
    ("other", "fail_trial", "double free or corruption (!prev)"),
    (
        "other",
        "fail_trial",
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  nobody knows",
    ),
    (
        "oom_runtime",
        "prune",
        (
            "INFO:     Application startup complete.\n"
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory"
        ),
    ),
    ("other", "fail_trial", "thread 'main' panicked at src/lib.rs:5:1:"),
    ("other", "fail_trial", "ERROR 01-02 03:04:05 [executor.py:9] Worker proc 1 died, exit code: -15"),
    ("other", "abort_sweep", "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown"),
    ("other", "abort_sweep", "docker: Error response from daemon: Conflict. The container name is already in use."),
    (
        "port_in_use",
        "retry",
        "docker: Error response from daemon: Bind for 0.0.0.0:80 failed: port is already allocated",
    ),
    ("other", "abort_sweep", "OSError: [Errno 24] Too many open files"),
    ("invalid_argument", "prune", "launch: error: argument --max-num-seqs: invalid int value: 'many'"),
    ("invalid_argument", "prune", "vllm serve: error: With `vllm serve`, you should provide the model as an argument"),
    ("version_mismatch", "abort_sweep", "exec /usr/bin/python3: exec format error"),
    ("version_mismatch", "abort_sweep", "/usr/bin/python: No module named vllm.entrypoints"),
    ("model_not_found", "abort_sweep", "ValueError: Repo id must be in the form 'namespace/repo_name': '/m'."),
    ("invalid_argument", "prune", "ValueError: max_num_active_seqs (64) must not exceed max_num_seqs (32)."),
    ("invalid_argument", "prune", "Value error, Cannot find the config file for awq"),
    ("invalid_argument", "prune", "RuntimeError: size_k must divisible by BLOCK_SIZE_K"),
    (
        "invalid_argument",
        "prune",
        "gpu_memory_utilization\n  Input should be less than or equal to 1 [type=less_than_equal]",
    ),
    ("invalid_argument", "prune", "Value error, --mamba-block-size can only be set together with another flag"),
    (
        "other",
        "abort_sweep",
        "ValueError: The decoder prompt (length 9000) is longer than the maximum model length of 4096.",
    ),
    (
        "invalid_argument",
        "prune",
        "ValueError: num_lookahead_tokens must be at least as large as the draft's, not enough",
    ),
    ("invalid_argument", "prune", "pydantic_core.ValidationError: 1 validation error for CacheConfig"),
    # The client's side.
    ("client_404_model_name", "abort_sweep", '{"message":"The model `chat` does not exist.","type":"NotFoundError"}'),
    ("client_401", "abort_sweep", 'HTTP/1.1 401 Unauthorized\n{"error":"Unauthorized"}'),
    ("client_timeout", "retry", "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected"),
    # Consequences.
    ("engine_dead", "fail_trial", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
    ("engine_dead", "fail_trial", 'INFO:     192.0.2.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable'),
    ("other", "fail_trial", "ValueError: a sentence that nobody has seen"),
    (
        "other",
        "fail_trial",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ),
)

# Lines with frightening words out of runs that work.
HARMLESS = (
    "WARNING 01-02 03:04:05 [autotuner.py:9] flashinfer.jit: [Autotuner]: OOM detected, falling back to default tactic",
    (
        "2026-01-02 03:04:05,678 - WARNING - autotuner.py:9 - flashinfer.jit: [Autotuner]: CUDA out of memory. Tried "
        "to do it"
    ),
    (
        "INFO 01-02 03:04:05 model_runner.py:9] CUDA graphs can take additional 1~3 GiB memory per GPU. If you are "
        "running out "
        "of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode."
    ),
    (
        "(EngineCore pid=9) INFO 01-02 03:04:05 [gpu_worker.py:9] Free memory on device (77.9/79.2 GiB) on startup. "
        "Desired GPU "
        "memory utilization is (0.92, 72.8 GiB). Actual usage is 15.2 GiB for weight."
    ),
    (
        "(EngineCore pid=9) INFO 01-02 03:04:05 [shm_broadcast.py:9] No available shared memory broadcast block found "
        "in 60 "
        "seconds. This typically happens when some processes are hanging or doing some time-consuming work."
    ),
    (
        "WARNING 01-02 03:04:05 scheduler.py:9] Sequence group 147 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there "
        "is not enough KV cache space."
    ),
    (
        "WARNING 01-02 03:04:05 [model.py:9] User-specified max_model_len (65536) is greater than the derived "
        "max_model_len."
    ),
    "[rank0]:[W102 03:04:05.247935068 ProcessGroupNCCL.cpp:9] Warning: WARNING: destroy_process_group() was not called",
    "  --cpu-offload-gb   parallel loading to avoid RAM OOM when using tensor parallel and large models",
)
