import asyncio
import json
import time
from pathlib import Path

import pytest

from sweep.load.client import Target, complete_once
from sweep.measure.prom import around, between, cache_config, parse, restarted, server_stats, total, window_stats
from sweep.measure.scrape import Scraper, fetch
from sweep.model import ServerStats
from tests.fakes.running import fake_vllm, free_port
from tests.measure.records import MS, scraped

BEFORE = """
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 50.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e9
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
python_gc_objects_collected_total{generation="0"} 3
"""
AFTER = """
vllm:prompt_tokens_total{engine="0",model_name="m"} 400.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 150.0
vllm:generation_tokens_total{engine="0",model_name="m"} 20.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 14.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


def test_differences_are_taken_over_all_engines() -> None:
    stats = server_stats(parse(BEFORE), parse(AFTER))
    assert stats == ServerStats(prompt_tokens=400, queue_s=0.5, running_peak=7)  # generation_tokens went down: None


def test_nothing_happened_is_none_for_means_and_0_for_counters() -> None:
    stats = server_stats(parse(BEFORE), parse(BEFORE))
    assert (stats.queue_s, stats.prompt_tokens) == (None, 0)
    assert server_stats((), ()) == ServerStats()


def test_only_what_is_used_is_kept() -> None:
    assert {sample.name for sample in parse(BEFORE)} == {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_queue_time_seconds_sum",
        "vllm:num_requests_running",
    }
    assert total(parse(BEFORE), "vllm:none") is None


def test_scrapes_near_two_times_and_around_them() -> None:
    scrapes = [scraped(at, generated=at) for at in (0, 1000, 2000, 3000)]

    def times(found) -> list[int]:
        return [at // MS for at, _ in found]

    assert times(between(scrapes, 900 * MS, 2400 * MS)) == [1000, 2000]
    assert times(around(scrapes, 900 * MS, 2400 * MS)) == [0, 1000, 2000, 3000]
    assert times(around(scrapes, 1000 * MS, 2000 * MS)) == [1000, 2000]
    assert (*between(scrapes, 900 * MS, 1100 * MS), *around(scrapes, -1, 5), *around(scrapes, 5, 3001 * MS)) == ()
    assert (*between([], 0, 1), *around([], 0, 1)) == ()
    stats = window_stats(scrapes, 900 * MS, 2400 * MS)
    assert stats is not None
    assert stats.generation_tokens == 1000


def test_a_counter_that_went_down_tells_of_a_new_process() -> None:
    assert not restarted([scraped(0, generated=5), scraped(1), scraped(2, generated=5), scraped(3, generated=9)])
    assert restarted([scraped(0, generated=5), scraped(1, generated=9), scraped(2, generated=8)])
    assert restarted([scraped(0, ttft=(1.0, 5)), scraped(1, ttft=(0.5, 2))])
    assert not restarted([])


def test_scrapes_out_of_turn_keep_their_order(tmp_path: Path) -> None:
    async def many(url: str) -> list[int]:
        async with Scraper(url + "/metrics") as scraper:
            await asyncio.gather(*(scraper.scrape() for _ in range(8)))
        return [at for at, _ in scraper.scrapes]

    with fake_vllm(tmp_path) as url:
        found = asyncio.run(many(url))
    assert len(found) == 10
    assert found == sorted(found)


def test_a_running_server_tells_its_settings_and_what_it_did(tmp_path: Path) -> None:
    async def measure(url: str) -> tuple[dict, ServerStats | None]:
        async with Scraper(url + "/metrics", path=tmp_path / "metrics.jsonl") as scraper:
            start = time.perf_counter_ns()
            for _ in range(3):
                await complete_once(Target(url, "m"), list(range(1000, 1040)), 5)
            await asyncio.sleep(1.2)
        stats = window_stats(scraper.scrapes, start, time.perf_counter_ns())
        return dict(cache_config(scraper.scrapes[0][1])), stats

    with fake_vllm(tmp_path, "--block-size", "8") as url:
        config, stats = asyncio.run(measure(url))
    assert config["block_size"] == "8"
    assert stats is not None
    assert (stats.prompt_tokens, stats.generation_tokens, stats.preemptions) == (120, 15, 0)
    assert stats.prefix_queries_tokens == 120
    assert stats.prefix_hits_tokens == 0  # each of the three has its own cache salt
    assert stats.prefill_s is not None
    assert stats.prefill_s > 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 3
    assert set(lines[0]) == {"t_ns", "kv_usage_frac", "running", "waiting"}


def test_a_server_without_metrics_leaves_a_gap(tmp_path: Path) -> None:
    async def measure(url: str) -> ServerStats | None:
        async with Scraper(url) as scraper:
            await scraper.scrape()
        return window_stats(scraper.scrapes, 0, 1)

    nowhere = f"http://127.0.0.1:{free_port()}/metrics"
    assert asyncio.run(measure(nowhere)) is None
    with pytest.raises(OSError, match=nowhere):
        asyncio.run(fetch(nowhere))
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="plain_openai") as url, pytest.raises(OSError, match="HTTP 404"):
        asyncio.run(fetch(url + "/metrics"))
