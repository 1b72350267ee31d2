"""What the load client measures, held against what a real vLLM says of the same requests; by hand, `make test-live`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sweep.load.client import Target
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.measure.client import level_scrapes
from sweep.measure.prefix import block_tokens
from sweep.measure.prom import cache_config, growth
from sweep.measure.scrape import Scraper
from sweep.measure.warmup import WarmupSection
from sweep.model import LevelStats, LoadRun
from sweep.run.measuring import measure_level
from sweep.run.warming import warmup_of
from sweep.serve.process import Server
from tests.live.test_failures import probe, serve

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

VOCABULARY = 1000  # well inside that of the tiny model
WARMUP = WarmupSection(min_s=4, max_s=20)


@dataclass(frozen=True)
class Measured:
    run: LoadRun
    stats: LevelStats
    hits: float  # tokens that the prefix cache served, from before the level to after it
    queries: float  # prompt tokens that were looked up in it
    block: int


Measure = Callable[..., Awaitable[Measured]]


def measured(tmp_path: Path, work: Callable[[Measure], Awaitable[None]]) -> None:
    """Start a server, and let the work measure loads on it. `measure(seed=…, **load)` is of one level."""

    async def run() -> None:
        launch = serve().launch({"gpu-memory-utilization": 0.3}, swept=(), trial_dir=tmp_path)
        async with Server(launch) as server:
            failure = await server.wait_ready(probe)
            assert failure is None, failure
            async with Scraper(f"{server.base_url}/metrics", server.api_key) as scraper:
                await work(lambda **told: level(server, scraper, **told))

    asyncio.run(run())


async def level(server: Server, scraper: Scraper, *, seed: int = 1, **told: Any) -> Measured:
    load = LoadSection.model_validate(told)
    run, stats = await measure_level(
        Target(server.base_url, server.served_model, server.api_key, load.endpoint),
        load.levels()[0],
        load,
        prompts=PromptSource(Plan(load, 7), seed, VOCABULARY, text=load.endpoint == "chat"),
        warmup=warmup_of(WARMUP, load),
        slo={},
        scraper=scraper,
        processes=1,
    )
    scrapes = level_scrapes(run, scraper.scrapes)
    (_, before), (_, after) = scrapes[0], scrapes[-1]
    hits, queries = (growth(before, after, f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert hits is not None
    assert queries is not None
    return Measured(run, stats, hits, queries, block_tokens(cache_config(after)))


@pytest.mark.parametrize("load", [{"concurrency": 4}, {"rate": 4}], ids=["closed", "open"])
def test_tokens_and_first_tokens_agree_with_the_server(tmp_path: Path, load: dict[str, Any]) -> None:
    async def work(measure: Measure) -> None:
        found = await measure(prompt={"tokens": 128}, output={"tokens": 32}, seconds=30, **load)
        client, server = found.stats.client, found.stats.server
        assert found.stats.valid, found.stats.reasons
        assert found.stats.failed == 0
        assert found.run.drained
        assert client is not None
        assert client.tokens == client.server_tokens
        assert sum(record.output_tokens for record in found.run.records) == client.tokens
        assert server is not None
        assert server.ttft_s is not None
        assert client.overhead_s is not None
        print(
            "overhead", client.overhead_s, "server's mean TTFT", server.ttft_s, "events late", client.late_events_frac
        )
        assert abs(client.overhead_s) <= max(0.005, 0.03 * server.ttft_s)

    measured(tmp_path, work)


def test_shared_prefixes_hit_as_computed_and_never_across_levels(tmp_path: Path) -> None:
    length, prefix, groups = 192, 128, 4

    async def work(measure: Measure) -> None:
        told = {
            "concurrency": 4,
            "requests": 150,
            "prompt": {"tokens": length, "shared_prefix": prefix, "groups": groups},
            "output": {"tokens": 8},
        }
        for _ in range(2):  # the very same prompts again: only the salt keeps the first level's cache from helping
            found = await measure(seed=1, **told)
            count = len(found.run.records)
            whole_blocks = prefix // found.block * found.block
            expected = whole_blocks * (count - groups) / (count * length)
            print("hits", found.hits / found.queries, "expected", expected, "requests", count, "block", found.block)
            assert found.queries == count * length
            assert found.hits / found.queries == pytest.approx(expected, abs=0.02)
            assert found.stats.valid, found.stats.reasons
        fresh = await measure(seed=1, **(told | {"prompt": {"tokens": length}}))
        assert fresh.hits == 0

    measured(tmp_path, work)


def test_a_conversation_hits_its_own_history(tmp_path: Path) -> None:
    async def work(measure: Measure) -> None:
        found = await measure(
            concurrency=2, requests=60, turns=3, prompt={"tokens": 64}, output={"tokens": 32, "natural": False}
        )
        assert found.stats.failed == 0, found.stats.errors
        later = [record for record in found.run.records if record.turn > 0 and record.status == "ok"]
        # Nothing has been computed from the last token of an answer when it is made.
        history = sum((record.history_tokens - 1) // found.block * found.block for record in later)
        print("hits", found.hits, "history in whole blocks", history)
        assert found.hits == pytest.approx(history, rel=0.02)
        assert found.stats.valid, found.stats.reasons

    measured(tmp_path, work)
