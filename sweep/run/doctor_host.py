"""The judgements of `doctor` on the machine around the GPUs: facts in, lines out."""

from __future__ import annotations

from sweep.run.doctor_facts import Cores, Disk, Folder, HostMemory, Ports
from sweep.run.doctor_line import Check, failure, ok, warning

_GIB = 1 << 30
_OWN_FILES = 128  # what a load process has open beside its connections
_FEW_FILES = 4096


def check_ports(ports: Ports, connections: int) -> list[Check]:
    if ports.problem:
        return failure(
            "ports",
            f"127.0.0.1 cannot be listened on and reached: {ports.problem}",
            "Bring the loopback interface up (`ip link set lo up`); in a sandbox, allow it.",
        )
    if ports.ephemeral is None:
        return ok("ports", "127.0.0.1 can be listened on")
    first, last = ports.ephemeral
    free = last - first + 1
    seen = f"127.0.0.1 can be listened on; the system hands out {first} to {last}"
    # A closed connection keeps its port for a minute, so twice the connections can be in use.
    if free < 2 * connections + 100:
        wider = "Widen it: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return warning("ports", f"{seen}, few for {connections} connections", wider)
    return ok("ports", seen)


def check_disk(disk: Disk) -> list[Check]:
    seen = f"{_gib(disk.free_bytes)} free for {', '.join(disk.uses)}"
    remedy = (
        "Free space there, or move them: HF_HOME (or the flag download-dir) for models, VLLM_CACHE_ROOT for vLLM's "
        "cache, TMPDIR for temporary files."
    )
    if disk.free_bytes < _GIB:
        return failure("disk", seen, remedy)
    return warning("disk", seen, remedy) if disk.free_bytes < 10 * _GIB else ok("disk", seen)


def check_results(folder: Folder) -> list[Check]:
    if folder.problem:
        return failure(
            "results",
            f"{folder.path} cannot be written: {folder.problem}",
            "Start the program where its results may be written, or mend that folder, its rights, or where it leads.",
        )
    return ok("results", f"{folder.path} can be written")


def check_shared_memory(folder: Folder, gpus: int) -> list[Check]:
    path = folder.path
    if folder.problem:
        return failure(
            "shm",
            f"{path} cannot be used: {folder.problem}",
            "vLLM's processes talk through it: mount a tmpfs there (in a container: --ipc=host or --shm-size=8g).",
        )
    if folder.free_bytes is None:
        return ok("shm", f"{path} can be written")
    seen = f"{_gib(folder.free_bytes)} free in {path}"
    if gpus > 1 and folder.free_bytes < _GIB:
        return warning("shm", f"{seen}, few for {gpus} GPUs", "In a container: --ipc=host or --shm-size=8g.")
    return ok("shm", seen)


def check_open_files(hard: int | None, connections: int) -> list[Check]:
    if hard is None:
        return ok("open files", "no limit")
    remedy = "Raise the hard limit (`ulimit -Hn`, or nofile in /etc/security/limits.conf), or lower the concurrency."
    if hard < connections + _OWN_FILES:
        return failure("open files", f"at most {hard}, but the load needs {connections + _OWN_FILES}", remedy)
    if hard < _FEW_FILES:
        return warning("open files", f"at most {hard}: vLLM and the load client may need more", remedy)
    return ok("open files", f"at most {hard:,}")


def check_memory(memory: HostMemory) -> list[Check]:
    free = memory.available_bytes
    held = ""
    if memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes:
        # How much of the limit is used is not compared: page cache counts as used, and is given back.
        free = min(free, memory.limit_bytes)
        held = f", limited by the container to {_gib(memory.limit_bytes)}"
    seen = f"{_gib(free)} of {_gib(memory.total_bytes)} available{held}"
    if memory.swap_used_bytes > _GIB:
        seen += f", {_gib(memory.swap_used_bytes)} swapped out"
    remedy = "End what else uses memory: the system kills processes when none is left, and servers are the largest."
    if free < _GIB:
        return failure("memory", seen, remedy)
    if free < 4 * _GIB or memory.swap_used_bytes > _GIB:
        return warning("memory", seen, remedy)
    return ok("memory", seen)


def check_cores(cores: Cores) -> list[Check]:
    seen = f"{cores.usable} cores, load {cores.load:.1f}"
    if cores.load > max(1.0, cores.usable / 2):
        return warning("cores", seen, "Something else is at work: measurements beside it are worth less.")
    if cores.usable < 2:
        return warning("cores", seen, "Server and load client share one core, so latencies include the client's.")
    return ok("cores", seen)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
