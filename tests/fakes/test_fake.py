"""The fake must be what it stands in for, or the tests that use it prove nothing."""

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from sweep.load.client import Target, Warmup, run_level
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.measure.scrape import Scraper
from sweep.measure.summary import level_stats
from sweep.model import LevelStats
from tests.fakes import running


def ask(url: str, body: dict | None = None, **headers: str) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (
            ["--gpu-memory-utilization", "0.98"],
            {"FAKE_VLLM_FREE_FRAC": "0.9"},
            "(72.00/80.00 GiB) on startup is less than desired GPU memory utilization (0.98, 78.40 GiB)",
        ),
        (["--gpu-memory-utilization", "0.2"], {}, "No available memory for the cache blocks"),
        (
            ["--gpu-memory-utilization", "0.25"],
            {},
            "To serve at least one request with the model's max seq len (32768)",
        ),
        (
            ["--gpu-memory-utilization", "0.97", "--max-num-seqs", "4096"],
            {},
            "warming up sampler with 4096 dummy requests",
        ),
        (["--gpu-memory-utilization", "0.9"], {"FAKE_VLLM_WEIGHTS_GIB": "90"}, "Failed to load model - not enough GPU"),
    ],
)
def test_memory_failures_name_their_cause_before_the_wrapper(args: list[str], env: dict[str, str], words: str) -> None:
    code, log = running.fails("serve", "m", "--port", str(running.free_port()), *args, **env)
    assert code == 1
    assert words in log
    assert log.index(words) < log.index("Engine core initialization failed. See root cause above.")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--swap-space", "4"], 2, "vllm serve: error: unrecognized arguments: --swap-space"),
        (["--performance-mode", "fast"], 2, "argument --performance-mode: invalid choice: 'fast'"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            1,
            "must be greater than or equal to max_num_seqs",
        ),
        (["--block-size", "0"], 1, "1 validation error for CacheConfig"),
    ],
)
def test_bad_flags(args: list[str], code: int, words: str) -> None:
    got, log = running.fails("serve", "m", *args)
    assert got == code
    assert words in log


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("gated", 1, "You are trying to access a gated repo."),
        ("model_missing", 1, "is not a valid model identifier"),
        ("die_at_start", 1, "Engine core initialization failed"),
    ],
)
def test_faults_at_start(fault: str, code: int, words: str) -> None:
    got, log = running.fails("serve", "m", "--port", str(running.free_port()), FAKE_VLLM_FAULT=fault)
    assert got == code
    assert words in log


def test_a_config_file_loses_false_and_yields_to_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "max_num_seqs: 32\nenable-prefix-caching: false\nno-enable-chunked-prefill: true\n"
        "block-size: 32\nmax-model-len: 4096\n"
    )
    with running.fake_vllm(tmp_path, "--config", str(config), "--block-size", "64") as url:
        _, metrics = ask(url + "/metrics")
        args = (tmp_path / "fake.log").read_text()
    assert 'block_size="64"' in metrics
    assert 'enable_prefix_caching="True"' in metrics
    assert "'max_num_seqs': 32" in args
    assert "'enable_chunked_prefill': False" in args


def test_the_engine_outlives_a_killed_server_and_not_a_stopped_one(tmp_path: Path) -> None:
    for number, outlives in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        port = running.free_port()
        process = running.start("serve", "m", "--host", "127.0.0.1", "--port", str(port), log=tmp_path / "log")
        running.wait_ready(process, port)
        [engine] = psutil.Process(process.pid).children()
        assert engine.name().startswith("VLLM::EngineCor")
        assert engine.cmdline()[0] == "VLLM::EngineCore"
        process.send_signal(number)
        process.wait(timeout=10)
        time.sleep(0.1)
        assert engine.is_running() == outlives
        running.kill_group(process)


def test_a_dead_engine_ends_the_server_with_exit_code_0(tmp_path: Path) -> None:
    port = running.free_port()
    process = running.start("serve", "m", "--host", "127.0.0.1", "--port", str(port), log=tmp_path / "log")
    try:
        running.wait_ready(process, port)
        os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
        assert process.wait(timeout=10) == 0
    finally:
        running.kill_group(process)
    assert "EngineDeadError" in (tmp_path / "log").read_text()


def test_answers_have_vllms_shape(tmp_path: Path) -> None:
    body = {"model": "served", "prompt": [5, 6, 7], "max_tokens": 5}
    with running.fake_vllm(tmp_path, "--served-model-name", "served", VLLM_API_KEY="secret") as url:
        assert ask(url + "/v1/models") == (401, '{"error": "Unauthorized"}')
        assert ask(url + "/health") == (200, "")
        key = {"Authorization": "Bearer secret"}
        code, answer = ask(url + "/v1/completions", body | {"model": "m"}, **key)
        assert code == 404
        assert json.loads(answer)["error"]["message"] == "The model `m` does not exist. Valid aliases: served."
        _, answer = ask(url + "/v1/completions", body, **key)
        assert json.loads(answer)["usage"]["completion_tokens"] == 4  # without ignore_eos it stops by itself
        messages = {"model": "served", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 5}
        options = {
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        _, answer = ask(url + "/v1/chat/completions", messages | options, **key)
    *events, done = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    role, *tokens, usage = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(event["choices"][0]["token_ids"]) for event in tokens] == [1] * 5
    assert "" in [event["choices"][0]["delta"]["content"] for event in tokens]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


def test_adapters_answer_to_their_names_and_share_no_cache(tmp_path: Path) -> None:
    adapters = ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "docs=/adapters/docs"]
    with running.fake_vllm(tmp_path, *adapters) as url:
        _, cards = ask(url + "/v1/models")
        for name in ("m", "sql", "docs", "sql"):
            code, _ = ask(url + "/v1/completions", {"model": name, "prompt": list(range(40)), "max_tokens": 2})
            assert code == 200
        _, metrics = ask(url + "/metrics")
    assert [card["id"] for card in json.loads(cards)["data"]] == ["m", "sql", "docs"]
    assert counter(metrics, "prefix_cache_hits") == 32  # the second time of one of them alone


def test_a_reasoning_parser_sends_the_first_half_apart(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "why"}], "max_tokens": 6, "stream": True}
    with running.fake_vllm(tmp_path, "--reasoning-parser", "qwen3") as url:
        _, answer = ask(url + "/v1/chat/completions", body | {"ignore_eos": True})
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    events = [json.loads(line) for line in lines[1:-1]]  # without the role and [DONE]
    kinds = [next(iter(event["choices"][0]["delta"])) for event in events]
    assert kinds == ["reasoning"] * 3 + ["content"] * 3


def counter(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"vllm:{name}_total"))


def test_an_occupied_port_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    with running.fake_vllm(tmp_path) as url:
        code, log = running.fails("serve", "m", "--host", "127.0.0.1", "--port", url.rpartition(":")[2])
    assert code == 1
    assert "OSError: [Errno 98] Address already in use" in log
    assert "Loading" not in log


def measure(tmp_path: Path, *args: str, prefix: int = 0, tokens: int = 256, **env: str) -> LevelStats:
    load = LoadSection.model_validate(
        {
            "concurrency": 12,
            "requests": 60,
            "prompt": {"tokens": tokens, "shared_prefix": prefix},
            "output": {"tokens": 12},
        }
    )

    async def run(url: str) -> LevelStats:
        async with Scraper(url + "/metrics") as scraper:
            done = await run_level(
                Target(url, "m"),
                load.levels()[0],
                load,
                prompts=PromptSource(Plan(load, 3), 1),
                warmup=Warmup(0.2, 0.4, lambda _bins: False),
                on_edge=scraper.scrape,
            )
        return level_stats(done, {}, scraper.scrapes)

    with running.fake_vllm(tmp_path, *args, FAKE_VLLM_SPEED="2", **env) as url:
        return asyncio.run(run(url))


def test_flags_matter(tmp_path: Path) -> None:
    free = measure(tmp_path, prefix=240)
    narrow = measure(tmp_path, "--max-num-seqs", "3", prefix=240)
    cold = measure(tmp_path, "--no-enable-prefix-caching", prefix=240)
    assert free.output_tps > 2 * narrow.output_tps
    assert narrow.server.queue_s > free.server.queue_s
    assert free.ttft_s.p50 < cold.ttft_s.p50
    assert free.server.prefix_hits_tokens > 0.7 * free.server.prefix_queries_tokens
    assert cold.server.prefix_queries_tokens == 0


def test_a_full_cache_preempts_and_every_request_still_gets_its_tokens(tmp_path: Path) -> None:
    small = ["--max-model-len", "512", "--kv-cache-memory-bytes", str(1024 * 128 * 1024)]
    stats = measure(tmp_path, *small, tokens=124)
    assert (stats.completed, stats.failed) == (60, 0)
    assert stats.server.preemptions > 0
    assert stats.server.kv_usage_peak_frac > 0.8
