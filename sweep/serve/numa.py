"""The memory that vLLM's CPU backend reckons with: of one NUMA node, within the limit of the container."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sweep.model import DeviceMemory

# Where cgroup v2 and v1 keep a container's limit and what it uses. vLLM looks at these places only.
_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_NO_LIMIT = 1 << 62  # version 1 writes a number about this large for "none"


def node_memory(
    env: Mapping[str, str], *, root: Path = Path("/"), cores: Iterable[int] | None = None
) -> DeviceMemory | None:
    """Return the memory that vLLM's CPU build, started with `env`, takes its share of; None where it cannot be read.

    As vllm/v1/worker/cpu_worker.py and vllm/utils/cpu_resource_utils.py of 0.32 have it: the node of the core that the
    first worker is bound to, with page cache and reclaimable slabs counted as free. root, cores: for tests.
    """
    allowed = os.sched_getaffinity(0) if cores is None else set(cores)
    try:
        nodes = _nodes(env, root)
        node = _node_of(_first_core(env, allowed, nodes, root), root)
        return _limited(_meminfo(node if node in nodes else nodes[0], root), root)
    except (OSError, ValueError, LookupError):
        return None


def cgroup_bytes(root: Path = Path("/")) -> tuple[int, int | None] | None:
    """Return a container's limit of memory and what it uses; None where there is no limit."""
    for limit_path, used_path in _CGROUPS:
        limit = _number(root / limit_path)
        if limit is not None:
            return (limit, _number(root / used_path)) if limit < _NO_LIMIT else None
    return None


def _nodes(env: Mapping[str, str], root: Path) -> list[int]:
    status = (root / "proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("Mems_allowed_list:"))
    allowed = _numbers(line.partition(":")[2])
    asked = env.get("CPU_VISIBLE_MEMORY_NODES")
    if not asked or "VLLM_CPU_SIM_MULTI_NUMA" in env:
        return allowed
    return [node for node in map(int, asked.split(",")) if node in allowed]


def _first_core(env: Mapping[str, str], allowed: set[int], nodes: list[int], root: Path) -> int:
    """Return the first core of the first worker, which its OpenMP threads bind it to before it looks at memory."""
    bind = env.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bind not in {"auto", "nobind"}:
        return min(_numbers(bind.partition("|")[0]))
    near = [core for core in allowed if _node_of(core, root) == nodes[0]] if bind == "auto" else []
    return min(near or allowed)


def _node_of(core: int, root: Path) -> int:
    folders = (root / f"sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")
    return next((int(folder.name.removeprefix("node")) for folder in folders), 0)


def _meminfo(node: int, root: Path) -> tuple[int, int, bool]:
    """Return total and free memory of a node, and whether they are a node's; without NUMA those of the machine."""
    path = root / f"sys/devices/system/node/node{node}/meminfo"
    if not path.exists():
        whole = _kib((root / "proc/meminfo").read_text(encoding="utf-8"))
        return whole["MemTotal"], whole["MemAvailable"], False
    found = _kib(path.read_text(encoding="utf-8"))
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return found["MemTotal"], sum(found[part] for part in parts), True


def _limited(seen: tuple[int, int, bool], root: Path) -> DeviceMemory:
    total, free, of_node = seen
    limit = cgroup_bytes(root) if of_node else None
    if limit is not None and limit[0] < total:
        total, free = limit[0], max(0, min(free, limit[0] - (limit[1] or 0)))
    return DeviceMemory(total, free, "numa")


def _kib(text: str) -> dict[str, int]:
    """Read lines such as "Node 0 MemTotal: 97421888 kB" and "MemTotal: 97421888 kB" into bytes."""
    pairs = (line.rpartition(":") for line in text.splitlines() if line.endswith(" kB"))
    return {name.split()[-1]: int(value.split()[0]) * 1024 for name, _, value in pairs}


def _numbers(text: str) -> list[int]:
    """Read a list as the kernel writes it: 0-2,4."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or "max"
        return None
