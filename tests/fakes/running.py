"""Starts the fake vLLM for a test and takes it away again, with whatever it left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAM = Path(__file__).with_name("vllm.py")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(*args: str, log: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """Start it in its own process group; without a log its output is in `stdout`."""
    with ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *args],
            stdout=subprocess.PIPE if log is None else stack.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"FAKE_VLLM_START_S": "0"} | env,
            start_new_session=True,
        )


def kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def fails(*args: str, **env: str) -> tuple[int, str]:
    """Run it to its end; returns the exit code and what it wrote."""
    process = start(*args, **env)
    try:
        output, _ = process.communicate(timeout=30)
    finally:
        kill_group(process)
    return process.returncode, output


def wait_ready(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError(f"the fake did not start, exit code {process.poll()}")


@contextmanager
def fake_vllm(tmp_path: Path, *args: str, **env: str) -> Iterator[str]:
    """Yield the base URL of a running fake that serves the model m."""
    port = free_port()
    flags = ("serve", "m", "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log")
    process = start(*flags, *args, log=tmp_path / "fake.log", **({"FAKE_VLLM_SPEED": "5"} | env))
    try:
        wait_ready(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_group(process)
