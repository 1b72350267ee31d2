"""What is known of vLLM's flags: their names, who may set them, how a file spells them, which values go together.

Checked against vLLM 0.32. A flag that stands in no table here is passed on as it is: vLLM's own parser knows best.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from sweep.model import Flags, FlagValue

_BY_SWEEP = "every launch sets it itself"
_BY_MODEL = "it belongs in serve.model, serve.revision"
_CODE = "it loads code or opens files of this machine to requests"
_SECRET = "it is a secret: export it in the shell instead (VLLM_API_KEY, HF_TOKEN)"  # noqa: S105  (a sentence)
_SHAPE = "a trial is one server on one port of this machine"

# Flags that a search space may not name, with the reason. A trailing * stands for any ending.
OWNED: dict[str, str] = {
    "host": _BY_SWEEP,
    "port": _BY_SWEEP,
    "config": _BY_SWEEP,
    "shutdown-timeout": _BY_SWEEP,
    "disable-uvicorn-access-log": _BY_SWEEP,
    "model": _BY_MODEL,
    "revision": _BY_MODEL,
    "api-key": _SECRET,
    "hf-token": _SECRET,
    "uds": _SHAPE,
    "ssl-*": _SHAPE,
    "enable-ssl-refresh": _SHAPE,
    "root-path": _SHAPE,
    "headless": _SHAPE,
    "grpc*": _SHAPE,
    "api-server-count": _SHAPE,
    "middleware": _CODE,
    "tool-parser-plugin": _CODE,
    "reasoning-parser-plugin": _CODE,
    "tool-server": _CODE,
    "allowed-local-media-path": _CODE,
}

# Flags that change what the model answers, or which requests are accepted: not the same service any more.
QUALITY: frozenset[str] = frozenset(
    {
        "config-format",
        "dtype",
        "generation-config",
        "hf-config-path",
        "hf-overrides",
        "kv-cache-dtype",
        "kv-cache-dtype-skip-layers",
        "limit-mm-per-prompt",
        "load-format",  # `dummy` answers with random weights
        "lora-dtype",
        "mamba-cache-dtype",
        "mamba-ssm-cache-dtype",
        "max-model-len",
        "max-num-queued-reqs",
        "max-num-queued-tokens",
        "model-impl",
        "override-generation-config",
        "quantization",
        "quantization-config",
        "spec-method",
        "spec-model",
        "spec-tokens",
        "speculative-config",
        "tokenizer",
        "tokenizer-mode",
        "tokenizer-revision",
        "video-pruning-rate",
    }
)

# What vLLM 0.32 refuses for certain. A rule that names an absent flag is not applied.
RULES: tuple[str, ...] = (
    "0 < gpu-memory-utilization <= 1",  # vllm/config/cache.py, CacheConfig
    "block-size >= 1",  # the same
    "max-num-seqs >= 1",  # vllm/config/scheduler.py, SchedulerConfig
    "max-num-batched-tokens >= 1",
    "max-num-batched-tokens >= max-num-seqs",  # SchedulerConfig.verify_max_model_len
    "enable-chunked-prefill or max-num-batched-tokens >= max-model-len",
    "max-num-active-seqs <= max-num-seqs",
    "max-num-active-seqs >= 1",
    "max-num-scheduled-tokens >= 1",
    "stream-interval >= 1",
    "long-prefill-token-threshold >= 0",
    "long-prefill-token-threshold <= max-model-len",
    "0 <= watermark < 1",
    "tensor-parallel-size >= 1",  # vllm/config/parallel.py, ParallelConfig
    "pipeline-parallel-size >= 1",
    "data-parallel-size >= 1",
    "data-parallel-size-local <= data-parallel-size",
    "enable-expert-parallel or not enable-eplb",
    "max-cpu-loras >= max-loras",  # vllm/config/lora.py, LoRAConfig
)

# What vLLM asks for on one platform besides, by its own word for it.
PLATFORM_RULES: dict[str, tuple[str, ...]] = {
    # vllm/platforms/cpu.py only warns; vllm/v1/worker/utils.py then finds "no common block size" with the kernel's.
    "cpu": ("block-size % 32 == 0",),
}

# Other spellings of a flag: the short ones of the command line, and aliases.
_ALIASES: dict[str, str] = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "n": "nnodes",
    "r": "node-rank",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "ep": "enable-expert-parallel",
    "q": "quantization",
    "O": "optimization-level",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
    "dc": "diffusion-config",
    "asc": "api-server-count",
    "device-memory-utilization": "gpu-memory-utilization",
}

# Plain switches without a `--no-` form, all of them off by default: off is said by leaving them out.
ONLY_ON = frozenset({"aggregate-engine-logging", "data-parallel-multi-port-external-lb", "disable-log-stats"})

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_INTEGER = re.compile(r"[+-]?\d+")


def normalise(name: str) -> str:
    """Return the long name with dashes. What follows a dot is the key of a nested option and keeps its spelling."""
    head, dot, rest = name.strip().removeprefix("--").partition(".")
    head = head.replace("_", "-")
    return _ALIASES.get(head, head) + dot + rest


def refusal(name: str, *, allow_remote_code: bool = False) -> str | None:
    """Return why a search space may not set this flag, or None."""
    name = normalise(name).partition(".")[0].removeprefix("no-")
    if name == "trust-remote-code" and not allow_remote_code:
        return "it runs code of the model's repository: set serve.allow_remote_code: true if you trust it"
    for owned, reason in OWNED.items():
        if name == owned or (owned.endswith("*") and name.startswith(owned[:-1])):
            return reason
    return None


def changes_answers(name: str) -> bool:
    """Tell whether the flag is one of QUALITY, or a nested option of one."""
    return normalise(name).partition(".")[0] in QUALITY


def normalise_flags(flags: Mapping[str, Any], *, allow_remote_code: bool = False) -> Flags:
    """Return the flags under their canonical names; `no-x: true` becomes `x: False`.

    Raises ValueError with a message for people: a flag given twice, one that is refused, a value that cannot be one.
    """
    result: Flags = {}
    for given, raw in flags.items():
        name = normalise(str(given))
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
            raise ValueError(f"{given!r} is not the name of a vLLM flag")
        if reason := refusal(name, allow_remote_code=allow_remote_code):
            raise ValueError(f"{name} cannot be set here: {reason}")
        check_value(name, raw)
        negated = name.startswith("no-") and isinstance(raw, bool)
        if negated:
            name = name.removeprefix("no-")
        if name in result:
            raise ValueError(f"{name} is given twice (dashes and underscores mean the same)")
        result[name] = not raw if negated else raw
    return result


def check_value(name: str, value: Any) -> None:
    """Raise ValueError with the fix when vLLM cannot be given this value."""
    if value is None:
        raise ValueError(f"{name} has no value: leave the line out to keep vLLM's default")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number")
    if isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, list):
        for item in value:
            check_value(name, item)
    elif isinstance(value, dict):
        _check_json(name, value)
    elif not isinstance(value, bool | int | float):
        # ValueError, because that is what pydantic turns into a message.
        raise ValueError(f"{name}: {value!r} is a {type(value).__name__}; quote it if it is meant as text")  # noqa: TRY004


def _check_json(name: str, value: dict[Any, Any]) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: only plain text, finite numbers, true and false can stand in it") from None


def _check_text(name: str, text: str) -> None:
    if text.lower() in {"true", "false"}:
        raise ValueError(f"{name}: write {text.lower()} without quotes")
    if re.fullmatch(r"\d+(\.\d+)?\s*%", text):
        raise ValueError(f"{name}: write {float(text.rstrip('% ')) / 100:g} instead of {text}")
    if not text or _CONTROL.search(text):
        raise ValueError(f"{name} must be text without line breaks or control characters")
    if text.startswith("-") and not _INTEGER.fullmatch(text):
        raise ValueError(f"{name}: {text!r} would be read as another flag, because it begins with a dash")


def to_config(model: str, revision: str | None, flags: Flags) -> dict[str, Any]:
    """Return the content of a file for `vllm serve --config`, which reads a mapping in its own way.

    A `false` in it is dropped without a word (vLLM 0.32), so a flag is switched off by its `no-` form; a list of
    mappings is read only as JSON texts, and so is all but a number under a name with a dot; an empty value or list is
    an error or nothing.
    """
    config: dict[str, Any] = {"model": model}
    if revision is not None:
        config["revision"] = revision
    for name, value in sorted(flags.items()):
        if value is None or value == []:
            continue
        if "." in name and isinstance(value, bool | list | dict):
            config[name] = json.dumps(value)
        elif value is not False:
            config[name] = _spelt(value)
        elif name not in ONLY_ON:
            config[f"no-{name}"] = True
    return config


def _spelt(value: FlagValue) -> Any:
    if isinstance(value, list):
        return [json.dumps(item) if isinstance(item, dict | list) else item for item in value]
    return value


def config_text(model: str, revision: str | None, flags: Flags) -> str:
    """Return `to_config` as YAML, model first."""
    return yaml.safe_dump(to_config(model, revision, flags), sort_keys=False, width=1000)
