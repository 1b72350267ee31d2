"""How a real vLLM fails, and that each failure gets its name; run by hand with `make test-live`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from sweep.failure import Failure
from sweep.load.client import Target, complete_once
from sweep.model import Flags
from sweep.serve.kind import ServeSection
from sweep.serve.process import Server, kill_leftovers
from sweep.tiny_model import make

MODEL = Path(__file__).resolve().parents[2] / "results" / ".cache" / "tiny-qwen2"

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def serve(**changes: object) -> ServeSection:
    make(MODEL)
    told = {
        "model": str(MODEL),
        "command": [sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        "args": {"max-model-len": 512, "enforce-eager": True},
        "start_timeout_s": 300,
    }
    return ServeSection.model_validate({**told, **changes})


async def probe(server: Server) -> str | None:
    target = Target(server.base_url, server.served_model, server.api_key)
    record = await complete_once(target, list(range(300, 316)), max_tokens=2)
    return None if record.status == "ok" else f"{record.status}: {record.error}"


def launch(tmp_path: Path, section: ServeSection, flags: Flags) -> Failure | None:
    async def run() -> Failure | None:
        async with Server(section.launch(flags, swept=tuple(flags), trial_dir=tmp_path)) as server:
            return await server.wait_ready(probe)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "kind", "treatment"),
    [
        ({"gpu-memory-utilization": 0.001}, "oom_kv_cache_none", "prune"),
        ({"gpu-memory-utilization": 0.999}, "oom_free_memory_lt_requested", "prune"),
        ({"gpu-memory-utilization": 0.3, "max-num-batched-tokens": 8, "max-num-seqs": 64}, "invalid_argument", "prune"),
        ({"gpu-memory-utilization": 0.3, "no-such-flag": 1}, "invalid_argument", "prune"),
    ],
)
def test_flags_that_cannot_run(tmp_path: Path, flags: Flags, kind: str, treatment: str) -> None:
    failure = launch(tmp_path, serve(), flags)
    assert failure is not None
    assert (failure.kind, failure.treatment) == (kind, treatment), failure


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    failure = launch(tmp_path, serve(model="no/such-model-here"), {"gpu-memory-utilization": 0.3})
    assert failure is not None
    assert failure.treatment == "abort_sweep", failure


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_nothing_outlives_a_killed_api_server(tmp_path: Path, when: str) -> None:
    async def run() -> None:
        launch = serve().launch({"gpu-memory-utilization": 0.3}, swept=(), trial_dir=tmp_path)
        async with Server(launch) as server:
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
