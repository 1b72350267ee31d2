"""The `bench` command: a sweep's load and figures against any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from sweep.errors import ConfigError, NoAnswerError
from sweep.load.client import Target, probe, run_level, served_models
from sweep.load.prompts import PromptSource, id_range
from sweep.load.workload import LoadSection
from sweep.measure.scrape import Scraper
from sweep.measure.summary import level_stats, whole_run
from sweep.measure.warmup import WarmupSection
from sweep.model import Dist, LevelStats, LoadRun
from sweep.run.warming import warmup_of
from sweep.search.objectives import LATENCIES, STATS, read_slo
from sweep.text import printable, quantity, slo_label

# Sizes of vocabularies whose token ids are tried: of nearly every model, then of a toy.
_VOCABULARIES = (None, 1024)
# For servers that take no ids.
_PROBE_TEXT = "one two three four five six seven eight"
_PROBE_TOKENS = 4

# Rows of the table: label, unit, where the figure stands in the document.
_ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("requests completed", "", ("completed",)),
    ("requests failed", "", ("failed",)),
    ("request rate", "req/s", ("request_rps",)),
    ("output throughput", "tok/s", ("output_tps",)),
    ("total throughput", "tok/s", ("total_tps",)),
    ("goodput", "req/s", ("goodput_rps",)),
    *(
        (f"{label} {stat}", "ms", (f"{key}_ms", stat))
        for key, label in (
            ("ttft", "TTFT"),
            ("ttft_sched", "TTFT from schedule"),
            ("tpot", "TPOT"),
            ("itl", "ITL"),
            ("e2e", "E2E"),
        )
        for stat in ("p50", "p99")
    ),
)


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Raises ConfigError for what is wrong with the arguments."""
    load = _load_of(args)
    slo = _slo_of(args)
    key = _api_key(args.api_key_env)
    targets = [Target(url, args.model, key, args.endpoint) for url in args.base_url]
    for target in targets:  # before the first is measured, or a typing error in the second would cost its result
        asyncio.run(_check_model(target))
    docs = [asyncio.run(bench(target, load, slo, args.seed, _warmup_of(args))) for target in targets]
    whole = docs[0] if len(docs) == 1 else {"results": docs}
    sys.stdout.write((json.dumps(whole, indent=2, allow_nan=False) if args.json else bench_table(docs)) + "\n")
    return 0 if all(doc["completed"] for doc in docs) else 3


async def bench(
    target: Target, load: LoadSection, slo: Mapping[str, float], workload_seed: int, warmup: WarmupSection
) -> dict[str, Any]:
    """Measure the first level of `load` on an endpoint, and return the document that `--json` prints.

    The caller has made sure that the endpoint serves the model.
    """
    target, vocab_size = await _adapted(target)
    text = load.endpoint == "chat" or not target.vllm
    prompts = PromptSource(load.prompt, secrets.randbits(60), workload_seed, vocab_size, text=text)
    async with Scraper(target.url("/metrics"), target.api_key) as scraper:
        run = await run_level(
            target,
            load.levels()[0],
            load,
            prompts=prompts,
            workload_seed=workload_seed,
            warmup=warmup_of(warmup, load),
            on_window=scraper.soon,
        )
    stats = level_stats(run, slo, scraper.window(run.window_start_ns, run.window_end_ns))
    return {**_document(target, stats, slo, whole_run(run, slo)), "first_error": _first_error(run)}


def _first_error(run: LoadRun) -> str | None:
    """Return the server's own words on the first request that failed."""
    return next((r.error for r in run.records if r.error and r.status not in {"ok", "cancelled"}), None)


async def _adapted(target: Target) -> tuple[Target, int | None]:
    """Find out by short completions whether the server knows vLLM's fields, and how large a vocabulary it has."""
    found = target
    for size in _VOCABULARIES:
        low, end = id_range(size)
        found, record = await probe(target, [low, end - 1] * 4, _PROBE_TEXT, _PROBE_TOKENS)
        if found.vllm and record.status == "ok":
            return found, size
    return found, None


async def _check_model(target: Target) -> None:
    try:
        names = await served_models(target)
    except OSError as error:  # TimeoutError is one
        raise NoAnswerError(f"--base-url {target.base_url}: {error or 'no answer in time'}") from error
    except ValueError as error:
        raise ConfigError(f"--base-url {target.base_url}: no list of models: {error}") from error
    if target.model not in names:
        raise ConfigError(
            f"--model {target.model}: {target.base_url} serves {', '.join(names) or 'nothing'}; take a name from these"
        )


def _document(target: Target, stats: LevelStats, slo: Mapping[str, float], whole: dict[str, Any]) -> dict[str, Any]:
    assert stats.client is not None
    document: dict[str, Any] = {
        "base_url": target.base_url,
        "model": target.model,
        "level": stats.level,
        "completed": stats.completed,
        "failed": stats.failed,
        "errors": stats.errors,
        "duration_s": stats.window_s,
        "request_rps": stats.request_rps,
        "output_tps": stats.output_tps,
        "total_tps": stats.total_tps,
        "ttft_ms": _ms(stats.ttft_s),
        "tpot_ms": _ms(stats.tpot_s),
        "itl_ms": _ms(stats.itl_s),
        "e2e_ms": _ms(stats.e2e_s),
        "warmup": {"seconds": stats.warmup_s, "requests": stats.warmup_requests, "steady": stats.steady},
        "whole_run": whole,
        "client": {
            "cpu_us_per_event": stats.client.cpu_us_per_event,
            "send_lag_ms": None if stats.client.send_lag_p99_s is None else 1000 * stats.client.send_lag_p99_s,
            "stamp_source": stats.client.stamp_source,
            "valid": stats.valid,
            "reasons": list(stats.reasons),
        },
    }
    if stats.ttft_sched_s is not None:
        document["ttft_sched_ms"] = _ms(stats.ttft_sched_s)
    if slo:
        document["goodput_rps"] = stats.goodput_rps
        document["slo"] = {"attainment_frac": stats.slo_attainment_frac} | {
            name: _judged(stats, name, limit_s) for name, limit_s in slo.items()
        }
    if stats.server is not None:
        document["server"] = asdict(stats.server)
    return document


def _judged(stats: LevelStats, name: str, limit_s: float) -> dict[str, Any]:
    metric, _, stat = name.partition("_")
    found = LATENCIES[metric][1](stats)
    value_s = None if found is None else STATS[stat].get(found)
    return {
        "limit_ms": 1000 * limit_s,
        "value_ms": None if value_s is None else 1000 * value_s,
        "met": value_s is not None and value_s <= limit_s,
    }


def _ms(found: Dist | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {key: value if key == "n" else 1000 * value for key, value in asdict(found).items()}


def bench_table(docs: Sequence[Mapping[str, Any]]) -> str:
    """Lay documents out side by side, for people."""
    rows = [["", *(str(doc["base_url"]) for doc in docs)]]
    for label, unit, path in _ROWS:
        values = [_found(doc, path) for doc in docs]
        if any(value is not None for value in values):
            rows.append([label, *(quantity(value, unit) for value in values)])
    names = [name for name in docs[0].get("slo", {}) if name != "attainment_frac"]
    rows += [[f"SLO {slo_label(n)}", *("met" if doc["slo"][n]["met"] else "missed" for doc in docs)] for n in names]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for doc in docs:
        failures = [f"{count} requests ended as {kind}" for kind, count in doc["errors"].items()]
        words = [f"the first of them: {printable(doc['first_error'])}"] if doc.get("first_error") else []
        lines += [f"note, {doc['base_url']}: {reason}" for reason in (*doc["client"]["reasons"], *failures, *words)]
    return "\n".join(lines)


def _found(doc: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = doc
    for key in path:
        value = value.get(key) if value is not None else None
    return None if value is None else float(value)


def _load_of(args: argparse.Namespace) -> LoadSection:
    concurrency = 16 if args.concurrency is None and args.rate is None else args.concurrency
    try:
        return LoadSection(
            concurrency=concurrency,
            rate=args.rate,
            prompt={"tokens": args.input_tokens},
            output={"tokens": args.output_tokens},
            requests=args.requests,
            seconds=args.seconds,
            endpoint=args.endpoint,
        )
    except ValidationError as error:
        raise ConfigError(_problems(error)) from None


def _warmup_of(args: argparse.Namespace) -> WarmupSection:
    try:
        return WarmupSection(min_s=min(WarmupSection().min_s, args.max_warmup), max_s=args.max_warmup)
    except ValidationError as error:
        raise ConfigError(f"--max-warmup: {_problems(error)}") from None


def _problems(error: ValidationError) -> str:
    return "\n".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for item in error.errors(include_url=False)
    )


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


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env {variable}: the environment variable {variable} is not set or empty")
    return os.environ[variable]
