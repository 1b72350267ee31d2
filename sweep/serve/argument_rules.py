"""The messages about the flags: of argparse, of pydantic, of vLLM's own checks."""

from __future__ import annotations

from sweep.serve.memory_rules import PARALLEL
from sweep.serve.rule import CONSEQUENCE, MODULE, SYMPTOM, rule

_VALUE = "vLLM refuses this value or this combination of values."
_ARGPARSE = r"^[\w./ -]{1,80}: error: "
# Other programs that are no parsers of vLLM's end like this as well: git, slurm.
_VLLM = r"^(?:\S{0,100}\.py|(?:\S{0,100}/)?vllm(?: [\w-]{1,30}){0,3}|\S{0,100}python[\d.]*(?: -m \S{1,100})?): error: "
# A name of a flag, as vLLM's own messages write it.
_FLAG = (
    r"(?:--[a-z][a-z0-9]+(?:-[a-z0-9]+)+|--dtype|--port|--seed|\b(?:gpu_memory_utilization|max_model_len|max_num_\w+"
    r"|block_size|swap_space|\w+_parallel_size|tp_size|dcp_size|kv_cache_\w+|enable_\w+|num_\w+_tokens|cudagraph_\w+"
    r"|compilation_config|long_prefill_token_threshold|max_\w*loras?\w*|prefix_\w+|num_scheduler_steps|\w+_backend"
    r"|mamba_\w+|speculative_\w+|attention_\w+|nnodes|quantization|distributed_\w+|data_parallel_\w+|cpu_offload_\w+"
    r"|hf_overrides|rope_scaling|tokenizer_mode|load_format|limit_mm_per_prompt|scheduling_policy|max_seq_len\w*)\b)"
)

ARGUMENT_RULES = (
    rule(
        "version_mismatch",
        "abort_sweep",
        _ARGPARSE + r"unrecognized arguments: .*--shutdown-timeout",
        "This vLLM is too old: vllm-sweep needs one that knows --shutdown-timeout (0.18 or newer).",
    ),
    rule(
        "invalid_argument",
        "abort_sweep",
        _ARGPARSE + r"(?:unrecognized arguments|ambiguous option|the following arguments are required)",
        "This version of vLLM does not know the flag, or misses one: correct its name, or leave it out.",
    ),
    rule("invalid_argument", "prune", rf"{_ARGPARSE}argument |{_VLLM}(?!unrecognized)", _VALUE),
    rule(
        "invalid_argument",
        "prune",
        r"invalid device ordinal|local rank \d+ is out of bounds"
        r"|World size \((?P<world_size>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)"
        r"|size \(\d+\) exceeds the number of visible \w+ devices",
        "Use no more GPUs than there are.",
        flags=PARALLEL,
    ),
    rule(
        "invalid_argument",
        "prune",
        r"must be divisible by tensor parallel size",
        "Take a tensor-parallel-size that divides the number of attention heads.",
        flags=PARALLEL,
    ),
    rule(
        "invalid_argument",
        "prune",
        r"is not divisible by min_thread_|is not divisible by weight quantization block|too large tensor parallel size"
        r"|^AssertionError: \d+ is not divisible by \d+|evenly divide the total world size",
        "The weights cannot be split like that: take a smaller tensor-parallel-size.",
        flags=PARALLEL,
    ),
    rule(
        "invalid_argument",
        "prune",
        r"User-specified max_model_len \((?P<max_model_len_tokens>\d+)\) is greater than the derived max_model_len "
        r"\([^)]{0,80}?=(?P<fitting_model_len_tokens>\d+)"
        r"|is greater than the derived max_model_len",
        "The model was made for shorter requests: set max-model-len to at most what the message names.",
        flags=("max-model-len",),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"max_num_batched_tokens \(\d+\) must be greater than or equal to max_num_seqs \((?P<max_num_seqs>\d+)\)"
        r"|max_num_batched_tokens \(\d+\) is smaller than max_model_len \((?P<max_model_len_tokens>\d+)\)",
        "Raise max-num-batched-tokens, or lower the other one of the two.",
        flags=("max-num-batched-tokens",),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"^(?:(?:[\w.]{1,120}\.)?(?:ValueError|RuntimeError|AssertionError)(?:: |\(['\"])"
        r"|Value error, )?(?:max_num_batched_tokens"
        r"|max_num_seqs|max_num_active_seqs|max_model_len|long_prefill_token_threshold|max_cpu_loras"
        r"|User-specified max_model_len|Invalid prefix_match_unit|Unsupported block size|GPU memory utilization must"
        r"|Too large swap space"
        r"|[Ii]nvalid block size|Block size must|Block_size)\b(?!$)"
        r"|needs \d+-token kernel blocks|share no supported KV cache block size"
        r"|ArgumentTypeError|customized max_cudagraph_capture_size"
        r"|larger than max_num_batched_tokens",
        _VALUE,
        words=(
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_active_seqs",
            "max_model_len",
            "long_prefill_token_threshold",
            "max_cpu_loras",
            "Invalid prefix_match_unit",
            "lock size",
            "Block_size",
            "GPU memory utilization must",
            "Too large swap space",
            "-token kernel blocks",
            "customized max_cudagraph_capture_size",
        ),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"No common block size for",
        "The attention backend cuts its cache otherwise: take a block-size as the line names it, or leave it out.",
        flags=("block-size",),
    ),
    rule("invalid_argument", "prune", r"(?:must|should) (?:be )?divisible by ", _VALUE, words=(" divisible by ",)),
    rule(
        "invalid_argument",
        "prune",
        r"Quantization method specified in the model config|Cannot find the config file for \w+",
        "Leave quantization out for a quantized checkpoint, or take one that has been quantized that way.",
        flags=("quantization",),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"^[\w.\[\]-]{1,80}: (?:Input should |Extra inputs are not|Unexpected keyword argument|Field required)",
        _VALUE,
        words=(
            "Input should ",
            "Extra inputs are not",
            "Unexpected keyword argument",
            "Field required",
        ),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"^(?:Value error|Assertion failed), ",
        _VALUE,
        words=("Value error, ", "Assertion failed, "),
        rank=SYMPTOM,
    ),
    rule(
        "other",
        "abort_sweep",
        r"is longer than the maximum model length|maximum context length is (?P<max_model_len_tokens>\d+) tokens",
        "The requests are longer than max-model-len: raise it, or send shorter ones.",
        rank=CONSEQUENCE,
        flags=("max-model-len",),
        doubtful=True,
    ),
    rule(
        "invalid_argument",
        "prune",
        rf"^(?:{MODULE}(?:Value|Type|Assertion)Error(?:: |\(['\"])).{{0,300}}?{_FLAG}",
        _VALUE,
        words=("ValueError", "TypeError", "AssertionError", "KeyError"),
        rank=CONSEQUENCE,
    ),
    rule(
        "invalid_argument",
        "prune",
        r"\d+ validation errors? for \w+",
        _VALUE,
        rank=CONSEQUENCE,
    ),
)
