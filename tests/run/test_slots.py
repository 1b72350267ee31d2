"""The worker's lease: what comes back when it dies, is cancelled, or cannot even begin."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from sweep.model import Job, Launch
from sweep.run.slots import run_job
from tests.fakes.running import PROGRAM
from tests.processes import left_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def job(tmp_path: Path, *, command: tuple[str, ...] | None = None, **env: str) -> Job:
    launch = Launch(
        model="some/model",
        revision=None,
        command=command or (sys.executable, str(PROGRAM), "serve"),
        env={"FAKE_VLLM_SPEED": "1", **env},
        flags={"max-num-seqs": 16},
        swept=("max-num-seqs",),
        trial_dir=str(tmp_path),
        start_timeout_s=60,
        stall_timeout_s=30,
        stop_timeout_s=5,
    )
    load = {"concurrency": 2, "prompt": {"tokens": 32}, "output": {"tokens": 12}, "requests": 12}
    return Job("s", 0, launch, load, {"warmup": {"min_s": 0.2, "max_s": 0.5}}, {}, seed=1, workload_seed=1)


def worker_pid() -> int:
    (worker,) = [p for p in psutil.Process().children() if "sweep.run.worker" in p.cmdline()]
    return worker.pid


def test_a_job_comes_back_measured(tmp_path: Path) -> None:
    said: list[str] = []
    measured = asyncio.run(run_job(job(tmp_path), said.append))
    assert measured.state == "complete"
    assert measured.levels[0].completed == 12
    assert "load c=2" in said
    assert not left_over([tmp_path])


def test_a_killed_worker_is_told_and_its_server_goes_with_it(tmp_path: Path) -> None:
    async def run() -> object:
        def say(text: str) -> None:
            if text.startswith("load"):
                os.kill(worker_pid(), signal.SIGKILL)

        return await run_job(job(tmp_path, FAKE_VLLM_FAULT="hang_stream_after=3"), say)

    measured = asyncio.run(run())
    assert measured.state == "failed"  # type: ignore[attr-defined]
    assert measured.failure.treatment == "retry"  # type: ignore[attr-defined]
    assert not left_over([tmp_path])


def test_a_cancelled_job_has_ended_its_server(tmp_path: Path) -> None:
    async def run() -> None:
        task: asyncio.Task[object] | None = None

        def say(text: str) -> None:
            if text.startswith("load") and task is not None:
                task.cancel()

        task = asyncio.create_task(run_job(job(tmp_path, FAKE_VLLM_FAULT="hang_stream_after=3"), say))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not left_over([tmp_path])


def test_a_program_that_is_not_there_stops_the_sweep(tmp_path: Path) -> None:
    measured = asyncio.run(run_job(job(tmp_path, command=("no-such-program",)), lambda _: None))
    assert measured.failure is not None
    assert measured.failure.treatment == "abort_sweep"
    assert "no-such-program" in measured.failure.evidence
