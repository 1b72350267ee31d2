"""The `bench` command: a sweep's load and figures against any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from typing import Any
from urllib.parse import urlsplit

from sweep.errors import ConfigError, NoAnswerError
from sweep.load.client import Target, probe, served_models, tokens_per_word
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource, id_range
from sweep.load.workload import Level
from sweep.measure.scrape import Scraper
from sweep.run.bench_document import document, table
from sweep.run.bench_load import Task, read_task
from sweep.run.measuring import measure_level
from sweep.run.warming import warmup_of

# Sizes of vocabularies whose token ids are tried: of nearly every model, then of a toy.
_VOCABULARIES = (None, 1024)
# For servers that take no ids.
_PROBE_TEXT = "one two three four five six seven eight"
_PROBE_TOKENS = 4


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Raises ConfigError for what is wrong with the arguments."""
    task = read_task(args)
    key = _api_key(args.api_key_env)
    targets = [Target(_checked(url), args.model, key, task.load.endpoint) for url in args.base_url]
    for target in targets:  # before the first is measured, or a typing error in the second would cost its result
        asyncio.run(_check_model(target))
    docs = [doc for target in targets for doc in asyncio.run(bench(target, task))]
    whole = docs[0] if len(docs) == 1 else {"results": docs}
    sys.stdout.write((json.dumps(whole, indent=2, allow_nan=False) if args.json else table(docs)) + "\n")
    return 0 if all(doc["completed"] for doc in docs) else 3


async def bench(target: Target, task: Task) -> list[dict[str, Any]]:
    """Measure every level of a load on an endpoint, and return the documents that `--json` prints.

    The caller has made sure that the endpoint serves the model.
    """
    target, vocab_size = await _adapted(target)
    plan = Plan(task.load, task.seed)
    text = task.load.endpoint == "chat" or not target.vllm
    per_word = await tokens_per_word(target) if text else None
    async with Scraper(target.url("/metrics"), target.api_key) as scraper:
        documents = []
        for level in task.load.levels():
            prompts = PromptSource(plan, secrets.randbits(60), vocab_size, text=text, tokens_per_word=per_word or 1.0)
            documents.append(await _measured(target, level, task, prompts, scraper))
        return documents


async def _measured(
    target: Target, level: Level, task: Task, prompts: PromptSource, scraper: Scraper
) -> dict[str, Any]:
    load = task.load
    run, stats = await measure_level(
        target,
        level,
        load,
        prompts=prompts,
        warmup=warmup_of(task.warmup, load),
        slo=task.slo,
        scraper=scraper,
        processes=1 if load.processes == "auto" else load.processes,
        say=lambda words: print(words, file=sys.stderr),  # noqa: T201 - progress of a command
    )
    return document(target, run, stats, task.slo)


async def _adapted(target: Target) -> tuple[Target, int | None]:
    """Find out by short completions whether the server knows vLLM's fields, and how large a vocabulary it has."""
    found = target
    for size in _VOCABULARIES:
        low, end = id_range(size)
        found, record = await probe(target, [low, end - 1] * 4, _PROBE_TEXT, _PROBE_TOKENS)
        if record.status.startswith("timeout"):
            raise NoAnswerError(f"--base-url {target.base_url}: a first short completion got {record.error}")
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


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError("--base-url: leave user and password out of the address; --api-key-env takes a key")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--base-url {url}: expected an address such as http://127.0.0.1:8000")
    return url


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env {variable}: the environment variable {variable} is not set or empty")
    return os.environ[variable]
