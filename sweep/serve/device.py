"""What NVIDIA's driver says of the GPUs that a server may use, and the memory that its utilization is a share of.

No GPU, no driver and no library are an answer, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from sweep.model import DeviceMemory
from sweep.serve.numa import node_memory

# What a GPU slows itself down for that costs a measurement its worth; power capping under load is ordinary.
_SLOWED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
# What comes of a function that this driver has not, or has otherwise, and of a text that is none.
_UNTOLD = (AttributeError, ValueError, pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU. name: None where it cannot be seen from here, as in a container."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one (mig), as NVML describes it; None for what the driver does not tell.

    total_bytes: without what the driver keeps for itself, which is what CUDA calls total. ecc_errors: uncorrected ones
    since the driver was loaded. remap_pending: memory was found bad and is replaced at the next reset.
    slowed: why its clocks are held down just now.
    """

    index: int
    uuid: str
    name: str
    mig: bool
    total_bytes: int | None
    free_bytes: int | None
    processes: tuple[GpuProcess, ...]
    compute_mode: str | None
    persistence: bool | None
    ecc_errors: int | None
    remap_pending: bool | None
    power_limit_w: float | None
    power_default_w: float | None
    slowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpus:
    """visible: those that CUDA_VISIBLE_DEVICES leaves, in its order. installed: how many there are without it.

    unknown: the first entry of CUDA_VISIBLE_DEVICES that means no GPU; CUDA ignores it and all after it.
    driver: its version. problem: why a driver that is there does not answer.
    """

    visible: tuple[Gpu, ...] = ()
    installed: int = 0
    driver: str | None = None
    unknown: str | None = None
    problem: str | None = None


class _Device(NamedTuple):
    handle: Any
    names: tuple[str, ...]  # its UUID, and of a MIG instance the older name as well


class _Board(NamedTuple):
    """A GPU of the machine: itself, or with MIG on, its instances."""

    number: int
    uuid: str
    mig: bool
    devices: tuple[_Device, ...]


def device_memory(
    env: Mapping[str, str],
    platform: str | None,
    *,
    count: int | None = None,
    nvml: Any = pynvml,
    root: Path = Path("/"),
) -> DeviceMemory | None:
    """Return the memory of the devices that a server started with `env` may use: of the GPUs the fullest one.

    platform: what vLLM calls the kind of device ("cpu", "cuda", …); None where nobody has asked it, and then only
    NVIDIA's GPUs are looked at. On "cpu" it is the memory that vLLM's CPU backend takes its share of. count: how many
    of the GPUs a server uses, the first ones. None where nobody says: other devices, GPUs that share the host's memory.
    """
    if platform == "cpu":
        return node_memory(env, root=root)
    if platform not in {"cuda", None} or _start(nvml) is not None:
        return None
    try:
        devices = _visible(_boards(nvml), env)[0][:count]
        memories = [_memory(nvml, device.handle) for _, device in devices]
    except _UNTOLD:
        return None
    finally:
        _ask(nvml, "nvmlShutdown")
    known = [memory for memory in memories if memory is not None]
    if not known or len(known) < len(memories):
        return None
    total, free = min(known, key=lambda memory: (memory[1] / memory[0], memory[1]))
    return DeviceMemory(total, free, "nvml")


def read_gpus(env: Mapping[str, str], nvml: Any = pynvml) -> Gpus:
    """Ask the driver about the GPUs that a process with this environment may use. Can hang where the driver does."""
    error = _start(nvml)
    if error is not None:
        absent = isinstance(error, nvml.NVMLError_LibraryNotFound | nvml.NVMLError_DriverNotLoaded)
        return Gpus(problem=None if absent else str(error))
    driver = _ask(nvml, "nvmlSystemGetDriverVersion")
    try:
        boards = _boards(nvml)
        visible, unknown = _visible(boards, env)
        gpus = tuple(_describe(nvml, board, device) for board, device in visible)
    except _UNTOLD as fault:  # a GPU that fell off the bus, a driver that was replaced under us
        return Gpus(driver=driver, problem=str(fault))
    finally:
        _ask(nvml, "nvmlShutdown")
    return Gpus(gpus, len(boards), driver, unknown)


def _start(nvml: Any) -> Exception | None:
    try:
        nvml.nvmlInit()
    except _UNTOLD as error:
        return error
    return None


def _ask(nvml: Any, function: str, *args: Any) -> Any:
    """Call NVML, and return None for what this driver, GPU or version of the library does not tell."""
    try:
        return getattr(nvml, function)(*args)
    except _UNTOLD:
        return None


def _boards(nvml: Any) -> list[_Board]:
    boards = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        devices = _instances(nvml, handle, uuid) if mig else (_Device(handle, (uuid,)),)
        boards.append(_Board(index, uuid, mig, devices))
    return boards


def _instances(nvml: Any, handle: Any, uuid: str) -> tuple[_Device, ...]:
    found = []
    for number in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if instance is not None:
            gpu_part = _ask(nvml, "nvmlDeviceGetGpuInstanceId", instance)
            compute_part = _ask(nvml, "nvmlDeviceGetComputeInstanceId", instance)
            names = (nvml.nvmlDeviceGetUUID(instance), f"MIG-{uuid}/{gpu_part}/{compute_part}")
            found.append(_Device(instance, names))
    return tuple(found)


def _visible(boards: list[_Board], env: Mapping[str, str]) -> tuple[list[tuple[_Board, _Device]], str | None]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indices, UUIDs or their beginnings, up to the first that means nothing.

    Indices count as NVML does (by PCI bus), as vLLM takes them too. CUDA uses one instance of a GPU with MIG on.
    """
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [(board, board.devices[0]) for board in boards if board.devices], None
    found: list[tuple[_Board, _Device]] = []
    for part in (part.strip() for part in chosen.split(",")):
        meant = _meant(boards, part)
        if len(meant) != 1:
            return found, part or None
        if meant[0] not in found:
            found += meant
    return found, None


def _meant(boards: list[_Board], part: str) -> list[tuple[_Board, _Device]]:
    if part.isdecimal():
        return [(board, board.devices[0]) for board in boards if board.number == int(part) and board.devices]
    if not part.startswith(("GPU-", "MIG-")):
        return []
    exact = [(b, d) for b in boards for d in b.devices if part in d.names]
    whole = [(b, b.devices[0]) for b in boards if b.devices and b.uuid.startswith(part)]
    begun = [(b, d) for b in boards for d in b.devices if any(name.startswith(part) for name in d.names)]
    return exact or whole or begun


def _memory(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return total and free memory. GPUs that share the host's memory have none of their own."""
    # Only the second version tells apart what the driver keeps for itself; drivers before 510 lack it.
    seen = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    if seen is not None:
        return int(seen.total - seen.reserved), int(seen.free)
    seen = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return None if seen is None else (int(seen.total), int(seen.free))


def _describe(nvml: Any, board: _Board, device: _Device) -> Gpu:
    handle = device.handle
    whole = nvml.nvmlDeviceGetHandleByIndex(board.number)  # what concerns clocks and errors is not told of instances
    total, free = _memory(nvml, handle) or (None, None)
    persistence = _ask(nvml, "nvmlDeviceGetPersistenceMode", whole)
    remapped = _ask(nvml, "nvmlDeviceGetRemappedRows", whole)
    reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", whole) or 0
    return Gpu(
        index=board.number,
        uuid=device.names[0],
        name=_ask(nvml, "nvmlDeviceGetName", handle) or "a GPU without a name",
        mig=board.mig,
        total_bytes=total,
        free_bytes=free,
        processes=_processes(nvml, handle),
        compute_mode=_COMPUTE_MODES.get(_ask(nvml, "nvmlDeviceGetComputeMode", whole)),
        persistence=None if persistence is None else bool(persistence),
        ecc_errors=_ask(
            nvml,
            "nvmlDeviceGetTotalEccErrors",
            whole,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        power_limit_w=_watts(_ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", whole)),
        power_default_w=_watts(_ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", whole)),
        slowed=tuple(why for bit, why in _SLOWED.items() if reasons & bit),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    seen = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return tuple(GpuProcess(process.pid, _name(process.pid), process.usedGpuMemory) for process in seen)


def _name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None
