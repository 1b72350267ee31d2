"""Where trials run: a slot starts a worker for a job and brings back what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from sweep.children import python_env
from sweep.errors import StoppedError
from sweep.failure import Failure
from sweep.model import Job, Measured
from sweep.serve.process import kill_leftovers

_LINE_LIMIT = 1 << 26
# After its lease is gone a worker stops its server: the server's own grace, and this for the worker itself.
_WORKER_MARGIN_S = 15.0


async def run_job(job: Job, say: Callable[[str], None]) -> Measured:
    """Run one job in a worker process of its own session, and return what it measured.

    When this call is cancelled the worker loses its lease; the call ends after the worker and its server are gone.
    """
    log = Path(job.launch.trial_dir) / "worker.log"
    with log.open("wb") as stderr:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sweep.run.worker",
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
            limit=_LINE_LIMIT,
            env=python_env(),
        )
    try:
        assert worker.stdin is not None
        worker.stdin.write(TypeAdapter(Job).dump_json(job) + b"\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            await worker.stdin.drain()
        measured = await _listen(worker, say)
    finally:
        await _end_of_lease(worker, job)
    return measured or _worker_died(worker.returncode, log)


async def _listen(worker: Process, say: Callable[[str], None]) -> Measured | None:
    assert worker.stdout is not None
    measured = None
    async for line in worker.stdout:
        try:
            message = json.loads(line)
        except ValueError:  # a worker killed in the middle of a line
            continue
        if "say" in message:
            say(message["say"])
        else:
            measured = TypeAdapter(Measured).validate_python(message["measured"])
    return measured


async def _end_of_lease(worker: Process, job: Job) -> None:
    """Close the worker's stdin and see it out, whatever cancels us meanwhile."""
    closing = asyncio.ensure_future(_close(worker, job))
    while not closing.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(closing)
    closing.result()


async def _close(worker: Process, job: Job) -> None:
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        await asyncio.wait_for(worker.wait(), job.launch.stop_timeout_s + _WORKER_MARGIN_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
    if survivors := await kill_leftovers(job.launch.trial_dir):
        raise StoppedError(
            f"the server's processes {', '.join(map(str, survivors))} cannot be killed and may hold the device's"
            " memory, so that no further trial can be trusted. See what they wait for; a wedged driver needs a reboot."
        )


def _worker_died(exit_code: int | None, log: Path) -> Measured:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    evidence = lines[-1] if lines else f"the worker ended with exit code {exit_code}"
    failure = Failure(
        kind="other",
        treatment="retry",
        evidence=evidence,
        advice=f"The trial's own process died (exit code {exit_code}). A killed one points to the host's memory.",
        phase="load",
        exit_code=exit_code,
    )
    return Measured("failed", failure=failure)
