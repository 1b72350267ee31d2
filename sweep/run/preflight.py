"""What can be known before the first launch: whether the installed vLLM takes the flags, and what it makes of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from sweep.config import SweepConfig
from sweep.errors import ConfigError, MachineError
from sweep.load.stamps import allow_open_files
from sweep.model import Flags
from sweep.serve.failures import classify
from sweep.serve.parser_check import ParsedConfig, check_configs
from sweep.serve.vllm_flags import to_config


@dataclass(frozen=True, slots=True)
class Preflight:
    """resolved: the baseline's values of all flags as the engine would use them, as far as they could be had.

    moe: whether the model is a mixture of experts; None where that could not be had.
    """

    vllm_version: str | None
    resolved: Flags = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    moe: bool | None = None


def config_file(config: SweepConfig, chosen: Flags) -> dict[str, object]:
    """Return the content of the YAML file that vLLM is started with for a trial."""
    return to_config(config.serve.model, config.serve.revision, config.flags(chosen))


async def preflight(config: SweepConfig) -> Preflight:
    """Let the vLLM that will serve read the flags that are sure to be used: the fixed, the baseline's, the enqueued.

    Raises ConfigError for flags that it refuses, MachineError where there is no vLLM or no model.
    """
    for level in config.load.levels():
        allow_open_files(level.concurrency)
    entries = {"serve.args": {}, "search.baseline": config.baseline}
    entries |= {f"search.enqueue.{i}": flags for i, flags in enumerate(config.search.enqueue)}
    entries["search.params"] = _a_point(config)
    parsed = await parse(config, entries)
    fixed = parsed["serve.args"]
    if fixed.unchecked:
        return Preflight(
            fixed.vllm_version, notes=(f"The flags could not be checked before the launch: {fixed.unchecked}",)
        )
    for key, result in parsed.items():
        # Of the swept flags only the names are certain: one point may well be refused and another accepted.
        if result.error and (key != "search.params" or "unrecognized arguments" in result.error):
            _refuse(key, result.error, config)
    baseline = parsed["search.baseline"]
    return Preflight(fixed.vllm_version, dict(baseline.resolved or {}), moe=baseline.moe)


def _a_point(config: SweepConfig) -> Flags:
    return {name: param.values()[0] for name, param in config.search.params.items()}


async def parse(config: SweepConfig, entries: Mapping[str, Flags]) -> dict[str, ParsedConfig]:
    with tempfile.TemporaryDirectory(prefix="vllm-sweep-") as folder:
        paths = {}
        for number, (key, chosen) in enumerate(entries.items()):
            paths[key] = Path(folder) / f"{number}.yaml"
            paths[key].write_text(yaml.safe_dump(config_file(config, chosen)), encoding="utf-8")
        return await check_configs(config.serve, paths)


def _refuse(key: str, error: str, config: SweepConfig) -> None:
    failure = classify(error, exit_code=2, phase="start", swept=(), fixed=tuple(config.serve.args))
    if failure.kind.startswith("oom_"):
        return  # memory is for the launch to find out, and a baseline without room is replaced
    if failure.kind in {"model_not_found", "auth_gated_model", "trust_remote_code_needed"}:
        key = "serve.model"
    text = f"{key}: vLLM refuses this: {failure.evidence}\n{failure.advice}"
    raise ConfigError(text) if failure.kind in {"invalid_argument", "unsupported_feature"} else MachineError(text)
