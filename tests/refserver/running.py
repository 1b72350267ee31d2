"""Starts the reference server for a test or a benchmark, and takes it away again."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VOID_LATENESS_MS = 0.2  # a server that was this late in 1 of 100 writes tells nothing about a client


@dataclass(frozen=True, slots=True)
class RefServer:
    """A running server."""

    url: str
    pid: int

    def truth(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/truth", timeout=60) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def reset(self) -> None:
        self._post("/truth/reset")

    def freeze(self, seconds: float) -> None:
        self._post(f"/freeze?seconds={seconds}")

    def play(self, cases: Sequence[tuple[str, int]]) -> None:
        """Give each of the next requests, in the order of their arrival, a scenario and a split."""
        self._post("/play", json.dumps(cases).encode())

    def _post(self, path: str, body: bytes = b"") -> None:
        request = urllib.request.Request(self.url + path, data=body, method="POST")
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def ref_server(*args: str, core: int | None = None) -> Iterator[RefServer]:
    """Yield a server that has the given options, on a core of its own if one is named."""
    pinned = () if core is None else ("--core", str(core))
    command = [sys.executable, "-m", "tests.refserver", "--port", "0", *pinned, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().split()
            assert line[:1] == ["listening"], f"the reference server did not start: {line}"
            yield RefServer(f"http://127.0.0.1:{line[1]}", process.pid)
        finally:
            process.terminate()
            process.wait(timeout=10)
