"""Runs a client to its end, on one core, and finds out what CPU time it took once it had begun to send."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PERIOD_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """cpu_s: user and system time of the process and all it waited for. samples: (perf_counter_ns, CPU seconds)."""

    code: int
    stdout: str
    stderr: str
    cpu_s: float
    samples: tuple[tuple[int, float], ...]

    def cpu_since_s(self, at_ns: int) -> float:
        """Return the CPU time from a moment to the end; before it lies the start-up."""
        position = bisect_right(self.samples, (at_ns, float("inf")))
        return self.cpu_s - (self.samples[position - 1][1] if position else 0.0)


def run(command: Sequence[str], folder: Path, *, core: int | None, timeout_s: float, env: Mapping[str, str]) -> Run:
    """Run a command whose output goes to files of the folder. Its time is up after timeout_s."""
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(pinned(command, core), stdout=stdout, stderr=stderr, env=os.environ | dict(env))
        samples: list[tuple[int, float]] = []
        ended = threading.Event()
        sampler = threading.Thread(target=_sample, args=(process.pid, samples, ended))
        sampler.start()
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # so that it is not waited for again
        killer.cancel()
        ended.set()
        sampler.join()
    return Run(
        code=process.returncode,
        stdout=(folder / "stdout").read_text(errors="replace"),
        stderr=(folder / "stderr").read_text(errors="replace"),
        cpu_s=usage.ru_utime + usage.ru_stime,
        samples=tuple(samples),
    )


def pinned(command: Sequence[str], core: int | None) -> list[str]:
    return list(command) if core is None else ["taskset", "-c", str(core), *command]


def _sample(pid: int, samples: list[tuple[int, float]], ended: threading.Event) -> None:
    while not ended.wait(_PERIOD_S):
        samples.append((time.perf_counter_ns(), _tree_cpu_s(pid)))


def _tree_cpu_s(pid: int) -> float:
    """Return the CPU time of a process, of its living children, and of the dead ones that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(_tree_cpu_s(int(child)) for child in children)
