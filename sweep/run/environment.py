"""What machine and which versions a study ran on: kept in environment.json, compared when the study goes on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from sweep import __version__
from sweep.serve.device import read_gpus


def describe(vllm_version: str | None) -> dict[str, Any]:
    """Return the facts of environment.json. `fingerprint` holds those that must stay the same within a study."""
    seen = read_gpus(os.environ)
    gpus = [
        {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory_bytes": gpu.total_bytes, "driver": seen.driver}
        for gpu in seen.visible
    ]
    device = _device(gpus)
    return {
        "vllm_sweep": __version__,
        "optuna": metadata.version("optuna"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu": _cpu_model(),
        "gpus": gpus,
        "device": device,
        "fingerprint": {"vllm": vllm_version, "device": device},
    }


def _device(gpus: list[dict[str, Any]]) -> str:
    if not gpus:
        return f"CPU, {os.cpu_count()} cores"
    names = [gpu["name"] for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _cpu_model() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), None)
    except OSError:
        return None
