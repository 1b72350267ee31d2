"""What machine and which versions a study ran on: kept in environment.json, compared when the study goes on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from sweep import __version__


def describe(vllm_version: str | None) -> dict[str, Any]:
    """Return the facts of environment.json. `fingerprint` holds those that must stay the same within a study."""
    gpus = _gpus()
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


def _gpus() -> list[dict[str, Any]]:
    """Return the NVIDIA GPUs that this process may use, by NVML; none when there is no driver."""
    try:
        import pynvml  # noqa: PLC0415 - only machines with a driver can use it

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library, no driver: all of them mean no GPU
        return []
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            if chosen is not None and str(index) not in chosen and uuid not in chosen:
                continue
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append({"index": index, "uuid": uuid, "name": name, "memory_bytes": int(memory.total)})
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [{**gpu, "driver": driver} for gpu in found]
    finally:
        pynvml.nvmlShutdown()


def _cpu_model() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), None)
    except OSError:
        return None
