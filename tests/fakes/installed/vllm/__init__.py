"""A package that looks like an installed vLLM to a child process: a parser, and an engine's configuration.

It writes a line into the file that FAKE_VLLM_IMPORTS names whenever it is imported.
"""

import json
import os
import random
from dataclasses import dataclass, field, fields
from pathlib import Path

from vllm._version import __version__ as __version__

if log := os.environ.get("FAKE_VLLM_IMPORTS"):
    with Path(log).open("a", encoding="utf-8") as file:
        file.write("imported\n")

HEADS = 4
MOST_SEQS = 64  # more of them are cut down, as a limit of a device does


@dataclass
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str


@dataclass
class CacheConfig:
    block_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float


@dataclass
class ModelConfig:
    model: str
    dtype: str = "bfloat16"
    quantization: str | None = None
    enforce_eager: bool = False
    is_moe: bool = False


@dataclass
class ParallelConfig:
    tensor_parallel_size: int


@dataclass
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    compilation_config: dict
    instance_id: float = field(default_factory=random.random)


@dataclass
class AsyncEngineArgs:
    model: str
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    compilation_config: dict = field(default_factory=dict)
    disable_log_stats: bool = False
    dtype: str = "bfloat16"
    quantization: str | None = None
    enforce_eager: bool | None = None

    @classmethod
    def from_cli_args(cls, args):
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})

    def create_engine_config(self, usage_context):
        if message := os.environ.get("FAKE_VLLM_NO_MODEL"):
            raise OSError(message)
        if (config := Path(self.model, "config.json")).is_file():
            json.loads(config.read_bytes())
        seqs = 32 if self.max_num_seqs is None else self.max_num_seqs
        tokens = 256 if self.max_num_batched_tokens is None else self.max_num_batched_tokens
        block = 32 if self.block_size is None else self.block_size
        if tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
            )
        if HEADS % self.tensor_parallel_size:
            raise ValueError(
                f"Total number of attention heads ({HEADS}) must be divisible by tensor parallel size"
                f" ({self.tensor_parallel_size})."
            )
        if self.quantization == "gptq":
            raise ValueError("Unknown quantization method: gptq. Must be one of ['awq', 'fp8'].")
        if self.quantization == "fp8" and self.dtype == "float32":
            raise ValueError("torch.float32 is not supported for quantization method fp8.")
        if os.environ.get("FAKE_VLLM_DRIFTS"):  # what one build leaves behind, the next one sees
            os.environ["FAKE_VLLM_DRIFTS"] += "x"
            tokens += len(os.environ["FAKE_VLLM_DRIFTS"])
        return VllmConfig(
            ModelConfig(self.model, self.dtype, self.quantization, bool(self.enforce_eager)),
            CacheConfig(block, self.enable_prefix_caching is not False, self.gpu_memory_utilization),
            SchedulerConfig(min(seqs, MOST_SEQS), tokens, self.scheduling_policy),
            ParallelConfig(self.tensor_parallel_size),
            {} if self.enforce_eager else self.compilation_config,
        )
