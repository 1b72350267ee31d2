"""What tests of whole sweeps share: waiting, and looking for processes that should be gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from sweep.serve.kind import MARKER
from sweep.serve.process import marker_of

# A study's folder when it is done, but for best_config.yaml, which a study without a result has not.
STUDY_FILES = [
    "config.yaml",
    "environment.json",
    "workload.json",
    "study.db",
    "lock",
    "trials.csv",
    "levels.csv",
    "report.html",
    "summary.md",
]


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def left_over(trial_dirs: Iterable[Path]) -> list[int]:
    """Return the living processes of these trials' servers, found by the mark that each of them carries."""
    markers = {marker_of(str(folder)) for folder in trial_dirs}
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) in markers:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
