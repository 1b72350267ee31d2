"""How a real vLLM fails, and that each failure gets its name, its treatment and true advice; by hand, `make test-live`.

What these launches looked like stands in docs/failures.md. The rows of its table are printed (`pytest -m live -rP`).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil
import pytest

from sweep.failure import Failure, FailureKind, Treatment
from sweep.load.client import Target, complete_once
from sweep.model import Flags, RequestRecord
from sweep.serve.device import device_memory
from sweep.serve.kind import ServeSection
from sweep.serve.process import Server, kill_leftovers
from sweep.tiny_model import make

MODEL = Path(__file__).resolve().parents[2] / "results" / ".cache" / "tiny-qwen2"

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPT = list(range(300, 316))
# Enough for the tiny model, and soon allocated.
FITS: Flags = {"gpu-memory-utilization": 0.1}
HUNDREDTH_GIB_BYTES = 1024**3 / 100  # what vLLM's messages are rounded to
# An API server looks every 5 s whether its engine lives.
DYING_S = 30.0


@dataclass(frozen=True)
class Case:
    """A launch that fails at its start, and what must be said of it.

    evidence, advice: patterns. numbers: keys of the bounds that the message gives.
    """

    flags: Flags
    kind: FailureKind
    treatment: Treatment
    evidence: str
    advice: str
    numbers: tuple[str, ...] = ()
    model: str = str(MODEL)
    env: dict[str, str] = field(default_factory=dict)


CASES = {
    "utilization above what is free": Case(
        {"gpu-memory-utilization": 0.999},
        "oom_free_memory_lt_requested",
        "prune",
        r"is less than desired CPU memory utilization \(0\.999",
        r"(lower|at most).*gpu-memory-utilization|gpu-memory-utilization.*(lower|at most)",
        ("free_bytes", "total_bytes", "requested_bytes"),
    ),
    "utilization too low for a KV cache": Case(
        {"gpu-memory-utilization": 0.001},
        "oom_kv_cache_none",
        "prune",
        r"less than requested memory for kv \(-",
        r"(raise|at least).*gpu-memory-utilization|gpu-memory-utilization.*(raise|at least)",
    ),
    "KV cache of 1000 bytes": Case(
        {"kv-cache-memory-bytes": 1000},
        "oom_kv_cache_none",
        "prune",
        r"No available memory for the cache blocks",
        r"raise",
    ),
    "KV cache smaller than one request": Case(
        {"kv-cache-memory-bytes": 4 << 20, "max-model-len": 2048},
        "oom_kv_cache_too_small",
        "prune",
        r"max seq len \(2048\).*estimated maximum model length is 1920",
        r"max-model-len",
        ("max_model_len_tokens", "fitting_model_len_tokens"),
    ),
    "KV cache larger than the memory": Case(
        {"kv-cache-memory-bytes": 1 << 44},
        "oom_free_memory_lt_requested",
        "prune",
        r"less than requested memory for kv \(16384",
        r"(lower|at most).*kv-cache-memory-bytes|kv-cache-memory-bytes.*(lower|at most)",
        ("free_bytes", "total_bytes"),
    ),
    "block size 33": Case(
        {**FITS, "block-size": 33}, "invalid_argument", "prune", r"No common block size for 33", r"value|block-size"
    ),
    "block size 16": Case(
        {**FITS, "block-size": 16}, "invalid_argument", "prune", r"No common block size for 16", r"value|block-size"
    ),
    "max-num-batched-tokens below max-num-seqs": Case(
        {**FITS, "max-num-batched-tokens": 8, "max-num-seqs": 64},
        "invalid_argument",
        "prune",
        r"max_num_batched_tokens \(8\) must be greater than or equal to max_num_seqs \(64\)",
        r"value|max-num-batched-tokens",
    ),
    "max-model-len beyond the model's": Case(
        {**FITS, "max-model-len": 4096}, "invalid_argument", "prune", r"max_model_len \(4096\)", r"value|max-model-len"
    ),
    "unknown flag": Case(
        {**FITS, "no-such-flag": 1},
        "invalid_argument",
        "abort_sweep",
        r"unrecognized arguments: --no-such-flag",
        r"does not know the flag",
    ),
    "invalid choice": Case(
        {**FITS, "dtype": "float99"}, "invalid_argument", "prune", r"--dtype: invalid choice: 'float99'", r"value"
    ),
    "model that the hub is not asked for": Case(
        FITS,
        "model_not_found",
        "abort_sweep",
        r"^[\w.]*Error: .*(no/such-model-here|cannot find|couldn.t connect|disabled)",
        r"serve\.model|download",
        model="no/such-model-here",
        env={"HF_HUB_OFFLINE": "1"},
    ),
    "model path that does not exist": Case(
        FITS,
        "model_not_found",
        "abort_sweep",
        r"/no/such/folder",
        r"serve\.model|download",
        model="/no/such/folder",
    ),
}


def serve(**changes: object) -> ServeSection:
    make(MODEL)
    told = {
        "model": str(MODEL),
        "command": [sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        "args": {"max-model-len": 512, "enforce-eager": True},
        "start_timeout_s": 300,
    }
    return ServeSection.model_validate({**told, **changes})


async def complete(server: Server, *, max_tokens: int) -> RequestRecord:
    target = Target(server.base_url, server.served_model, server.api_key)
    return await complete_once(target, PROMPT, max_tokens=max_tokens)


async def probe(server: Server) -> str | None:
    record = await complete(server, max_tokens=2)
    return None if record.status == "ok" else f"{record.status}: {record.error}"


async def started(server: Server) -> Failure | None:
    """Wait as a trial does. A server that failed is waited for to its end, so that its exit code is known."""
    failure = await server.wait_ready(probe)
    if failure is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(server.exited(), DYING_S)
    return failure


def report(name: str, server: Server, failure: Failure, seconds: float) -> None:
    cells = (name, server.exit_code, f"{seconds:.0f}", failure.kind, failure.treatment, failure.evidence)
    print("|", " | ".join(map(str, cells)), "|")
    print(failure.advice, failure.bounds)


@pytest.mark.parametrize("name", CASES)
def test_a_start_that_fails(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    section = serve(model=case.model, env=case.env)

    async def run() -> Failure:
        begun = monotonic()
        async with Server(section.launch(case.flags, swept=tuple(case.flags), trial_dir=tmp_path)) as server:
            failure = await started(server)
            assert failure is not None
            report(name, server, failure, monotonic() - begun)
            assert server.exit_code == (2 if " error: " in failure.evidence else 1)
            return failure

    failure = asyncio.run(run())
    assert (failure.kind, failure.treatment) == (case.kind, case.treatment), failure
    assert re.search(case.evidence, failure.evidence, re.IGNORECASE), failure.evidence
    assert re.search(case.advice, failure.advice, re.IGNORECASE | re.DOTALL), failure.advice
    numbers = failure.bounds or {}
    assert set(case.numbers) <= set(numbers), numbers
    if "total_bytes" in numbers:
        memory = device_memory(os.environ, "cpu")
        assert memory is not None
        assert numbers["total_bytes"] == pytest.approx(memory.total_bytes, abs=HUNDREDTH_GIB_BYTES)


def test_a_port_that_is_taken_after_it_was_chosen(tmp_path: Path) -> None:
    async def run() -> Failure:
        begun = monotonic()
        async with Server(serve().launch(FITS, swept=(), trial_dir=tmp_path)) as server:
            with socket.socket() as other:
                other.bind(("127.0.0.1", server.port))
                other.listen()
                failure = await started(server)
            assert failure is not None
            report("port in use", server, failure, monotonic() - begun)
            assert server.exit_code == 1
            return failure

    failure = asyncio.run(run())
    assert (failure.kind, failure.treatment) == ("port_in_use", "retry"), failure
    assert "in use" in failure.evidence
    assert "port" in failure.advice


def child(server: Server, name: str) -> int:
    """Return the process of this name below the API server; vLLM names its processes."""
    assert server._process is not None
    below = psutil.Process(server._process.pid).children(recursive=True)
    (found,) = (process.pid for process in below if name in " ".join(process.cmdline()))
    return found


async def until_it_fails(server: Server) -> RequestRecord:
    while (record := await complete(server, max_tokens=450)).status == "ok":
        pass
    return record


def killed_under_load(tmp_path: Path, name: str, flags: Flags, victim: Callable[[Server], int]) -> Failure:
    """Kill a process of the server while eight requests run, and return what is said of it."""

    async def run() -> Failure:
        async with Server(serve().launch(FITS | flags, swept=(), trial_dir=tmp_path)) as server:
            failure = await server.wait_ready(probe)
            assert failure is None, failure
            requests = [asyncio.create_task(until_it_fails(server)) for _ in range(8)]
            await asyncio.sleep(2)
            assert not any(request.done() for request in requests)
            killed = monotonic()
            os.kill(victim(server), signal.SIGKILL)
            records = await asyncio.gather(*requests)
            assert {record.status for record in records}.isdisjoint({"ok", "timeout_ttft"})
            failure = await server.failure("load")
            report(name, server, failure, monotonic() - killed)
            assert await server.exited() == 0  # it ends as if nothing had been
        assert await kill_leftovers(str(tmp_path)) == ()
        return failure

    return asyncio.run(run())


@pytest.mark.parametrize("executor", [None, "uni"])
def test_an_engine_that_is_killed_under_load(tmp_path: Path, executor: str | None) -> None:
    flags: Flags = {} if executor is None else {"distributed-executor-backend": executor}
    name = f"SIGKILL of the engine under load, executor {executor or 'by default'}"
    failure = killed_under_load(tmp_path, name, flags, lambda server: child(server, "EngineCore"))
    assert (failure.kind, failure.treatment) == ("engine_dead", "fail_trial"), failure
    assert failure.phase == "load"
    assert re.search("EngineDeadError|unexpectedly", failure.evidence)
    assert "killed" in failure.advice


def test_a_worker_that_is_killed_under_load(tmp_path: Path) -> None:
    name = "SIGKILL of the worker under load"
    failure = killed_under_load(tmp_path, name, {}, lambda server: child(server, "Worker"))
    # The engine may look before the exit code can be had; then the log does not say that it was a SIGKILL.
    told = "exit code: -9" in failure.evidence
    assert told or "exit code: None" in failure.evidence
    expected = ("host_oom_killed", "prune") if told else ("engine_dead", "fail_trial")
    assert (failure.kind, failure.treatment) == expected, failure
    assert "killed" in failure.advice


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_nothing_outlives_a_killed_api_server(tmp_path: Path, when: str) -> None:
    async def run() -> None:
        async with Server(serve().launch(FITS, swept=(), trial_dir=tmp_path)) as server:
            if when == "serving":
                assert await server.wait_ready(probe) is None
            else:
                while "EngineCore" not in server.log_path.read_text():
                    await asyncio.sleep(0.2)
            assert server._process is not None
            os.kill(server._process.pid, signal.SIGKILL)
            assert await server.exited() == -signal.SIGKILL
        assert await kill_leftovers(str(tmp_path)) == ()

    asyncio.run(run())
