"""What `bench` is to measure, read from its arguments or from a search space."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sweep.config import load_config
from sweep.errors import ConfigError
from sweep.load.workload import LoadSection
from sweep.measure.warmup import WarmupSection
from sweep.slo import read_slo

_INPUT_TOKENS = 512
_OUTPUT_TOKENS = 128
_CONCURRENCY = 16
# What a search space says itself.
_OF_LOAD = (
    "endpoint",
    "concurrency",
    "rate",
    "arrivals",
    "burstiness",
    "requests",
    "seconds",
    "input_tokens",
    "output_tokens",
    "shared_prefix",
    "prefix_groups",
    "processes",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A load, the limits of its requests in seconds, how it is warmed up, and the seed of its lengths and arrivals."""

    load: LoadSection
    slo: dict[str, float]
    warmup: WarmupSection
    seed: int


def read_task(args: argparse.Namespace) -> Task:
    """Read the arguments. Raises ConfigError with what is wrong with them."""
    slo = _slo_of(args)
    if args.space is None:
        return Task(_load_of(args), slo, _warmup_of(args, WarmupSection()), args.seed or 0)
    given = [f"--{name.replace('_', '-')}" for name in _OF_LOAD if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"--space {args.space} says what is sent; leave out {', '.join(given)}, or the file")
    config = load_config(Path(args.space))
    if any(level.search for level in config.load.levels()):
        raise ConfigError(
            f"--space {args.space}: load.rate: max is searched for by a sweep; bench measures given rates"
        )
    seed = config.search.seed if args.seed is None else args.seed
    return Task(config.load, {**config.objective.slo, **slo}, _warmup_of(args, config.measure.warmup), seed)


def _load_of(args: argparse.Namespace) -> LoadSection:
    prompt: dict[str, Any] = {
        "tokens": _INPUT_TOKENS if args.input_tokens is None else args.input_tokens,
        "shared_prefix": args.shared_prefix,
        "groups": args.prefix_groups,
    }
    values: dict[str, Any] = {
        "concurrency": _CONCURRENCY if args.concurrency is None and args.rate is None else args.concurrency,
        "rate": args.rate,
        "arrivals": args.arrivals,
        "burstiness": args.burstiness,
        "prompt": {name: value for name, value in prompt.items() if value is not None},
        "output": {"tokens": _OUTPUT_TOKENS if args.output_tokens is None else args.output_tokens},
        "requests": args.requests,
        "seconds": args.seconds,
        "endpoint": args.endpoint,
        "processes": args.processes,
    }
    try:
        return LoadSection.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(_problems(error)) from None


def _warmup_of(args: argparse.Namespace, section: WarmupSection) -> WarmupSection:
    if args.max_warmup is None:
        return section
    limits = {"min_s": min(section.min_s, args.max_warmup), "max_s": args.max_warmup}
    try:
        return WarmupSection.model_validate({**section.model_dump(), **limits})
    except ValidationError as error:
        raise ConfigError(f"--max-warmup: {_problems(error)}") from None


def _slo_of(args: argparse.Namespace) -> dict[str, float]:
    limits = {}
    for text in (text for group in args.slo for text in group):
        name, equals, limit = text.partition("=")
        if not equals:
            raise ConfigError(f"--slo {text}: expected NAME=LIMIT, such as ttft_p99=500ms")
        limits[name] = limit
    try:
        return read_slo(limits)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from None


def _problems(error: ValidationError) -> str:
    return "\n".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for item in error.errors(include_url=False)
    )
