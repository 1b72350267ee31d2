"""Measures one level of load: what a trial and `bench` have in common."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial

from sweep.load.client import Judge, Target, Warmup, run_level
from sweep.load.prompts import PromptSource
from sweep.load.workload import Level, LoadSection
from sweep.measure.goodput import misses
from sweep.measure.scrape import Scraper
from sweep.measure.summary import level_stats
from sweep.model import LevelStats, LoadRun


async def measure_level(
    target: Target,
    level: Level,
    load: LoadSection,
    *,
    prompts: PromptSource,
    warmup: Warmup,
    slo: Mapping[str, float],
    scraper: Scraper,
    processes: int,
    judge: Judge | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> tuple[LoadRun, LevelStats]:
    """Put a level of load on a server and summarise it. Raises what run_level does.

    Figures that the client itself has spoilt are measured once more, with twice as many processes where the CPUs allow
    it: at most half of them are taken from a server that may need them. What is still spoilt then stays so.
    """

    async def measure(count: int) -> tuple[LoadRun, LevelStats]:
        run = await run_level(
            target,
            level,
            load,
            prompts=prompts,
            warmup=warmup,
            processes=count,
            on_edge=scraper.scrape,
            judge=copy.deepcopy(judge),  # it may remember what it saw
            misses=None if judge is None else partial(misses, slo=slo),
        )
        return run, level_stats(run, slo, scraper.scrapes, exact_prompts=exact)

    exact = target.vllm and load.endpoint == "completions" and _made_up(prompts)
    run, stats = await measure(processes)
    # Each try has its own cache salt; a server that knows none would answer the second one from its cache.
    if not stats.again or not target.vllm:
        return run, stats
    more = more_processes(processes)
    say(f"load {level.name} again, with {more} client process{'es' if more > 1 else ''}: {stats.reasons[0]}")
    return await measure(more)


def first_error(run: LoadRun) -> str | None:
    """Return the server's own words on the first request that failed."""
    return next((r.error for r in run.records if r.error and r.status not in {"ok", "cancelled"}), None)


def _made_up(prompts: PromptSource) -> bool:
    """Tell whether all contents are random tokens, so that what they share is known."""
    plan = prompts.plan
    return plan.synthetic and not any(kind.prompt and kind.prompt.file for kind in plan.load.kinds)


def more_processes(count: int) -> int:
    """Return how many processes carry a load that was too much for `count` of them."""
    return max(count, min(2 * count, (os.cpu_count() or 1) // 2))
