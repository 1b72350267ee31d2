"""A server's life: started in a process group of its own, waited for, proved to be ours, ended to its last process."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self

import aiohttp
import psutil

from sweep.errors import MachineError
from sweep.failure import Failure, Phase
from sweep.model import Launch, ServerFacts
from sweep.serve import vllm_log
from sweep.serve.failures import classify
from sweep.serve.kind import CONFIG_NAME, MARKER, argv, child_env, served_model
from sweep.serve.vllm_flags import config_text

LOG_NAME = "server.log"

_POLL_S = 0.2
# An API server notices within 5 s that its engine has died, and then ends.
_DYING_S = 6.0
_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=5)
# Between the group's SIGTERM and its SIGKILL: what a worker needs to let go of its device.
_GROUP_GRACE_S = 5.0
# A killed process can be held up in the driver for as long as this; longer is a machine that needs a person.
_KILL_TIMEOUT_S = 30.0
# Python's own helper, which removes the shared memory of processes that were killed once the last of them is gone.
_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_GRACE_S = 2.0
# The path of a Unix socket ends at 107 bytes, and vLLM appends 37 to this folder's.
_LONGEST_TMP = 40


class Server:
    """One launch of a vLLM server: `async with Server(launch) as server`.

    Leaving the block ends every process of the launch, however it is left. on_progress is told the phase of the start.
    """

    def __init__(self, launch: Launch, *, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self.launch = launch
        self.api_key = secrets.token_urlsafe(24)
        self.served_model = served_model(launch)
        self.log_path = Path(launch.trial_dir) / LOG_NAME
        self.port = 0
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._stopping: asyncio.Task[tuple[int, ...]] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """Of the API server; negative for a signal, None while it runs. vLLM also ends with 0 after its engine died."""
        return None if self._process is None else self._process.returncode

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        command, env = self._prepare()
        # A file and no pipe: a pipe that nobody reads stops the server after 64 KiB.
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start {command[0]}: {error.strerror or error}") from error
        finally:
            os.close(log)

    def _prepare(self) -> tuple[list[str], dict[str, str]]:
        launch = self.launch
        self.port = _free_port()
        command = argv(launch, self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        text = config_text(launch.model, launch.revision, launch.flags)
        self.log_path.with_name(CONFIG_NAME).write_text(text, encoding="utf-8")
        marker = marker_of(launch.trial_dir)
        tmp = Path(tempfile.mkdtemp(prefix=_tmp_prefix(marker), dir=_tmp_root()))
        return command, child_env(launch, os.environ, marker=marker, api_key=self.api_key, tmp=tmp)

    async def exited(self) -> int:
        """Wait until the API server has ended, and return its exit code."""
        return await self._running().wait()

    async def wait_ready(self, probe: Callable[[Server], Awaitable[str | None]]) -> Failure | None:
        """Wait until the server answers, prove that it is ours and serves our model, and let `probe` have an answer.

        probe: makes a real completion and returns None, or what went wrong in a few words.
        """
        deadline = monotonic() + self.launch.start_timeout_s
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with aiohttp.ClientSession(timeout=_HTTP_TIMEOUT, trust_env=False, headers=headers) as session:
            failure = (
                await self._until_healthy(session, deadline) or self._stranger() or await self._wrong_model(session)
            )
        if failure is not None:
            return failure
        self._on_progress("first completion")
        try:
            async with asyncio.timeout(deadline - monotonic()):
                problem = await probe(self)
        except TimeoutError:
            return self._hung(f"no first completion within {self.launch.start_timeout_s:.0f} s of the start")
        return None if problem is None else await self._first_completion_failed(problem)

    async def _until_healthy(self, session: aiohttp.ClientSession, deadline: float) -> Failure | None:
        progress = vllm_log.Progress(self.log_path, self._on_progress)
        while not await self._healthy(session):
            progress.read()
            if self._running().returncode is not None:
                return await self.failure("start")
            if monotonic() > deadline:
                return self._hung(f"not ready after {self.launch.start_timeout_s:.0f} s")
            if monotonic() - progress.grown_at > self.launch.stall_timeout_s:
                return self._hung(f"no new line in the log for {self.launch.stall_timeout_s:.0f} s")
            await asyncio.sleep(_POLL_S)
        return None

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.base_url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _stranger(self) -> Failure | None:
        """Prove that whoever listens on our port is a process of this launch and nobody else."""
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == self.port
        ]
        ours = {process.pid for process in self._members()}
        foreign = [pid for pid in listening if pid not in ours]
        if listening and not foreign:
            return None
        holder = f"process {foreign[0]}" if foreign and foreign[0] else "a process that cannot be seen from here"
        return Failure(
            "port_in_use",
            "retry",
            evidence=f"port {self.port} is answered by {holder}, not by the server of this trial",
            advice="Another program took the port first. The trial is repeated on another one.",
            exit_code=self.exit_code,
        )

    async def _wrong_model(self, session: aiohttp.ClientSession) -> Failure | None:
        try:
            async with session.get(f"{self.base_url}/v1/models") as response:
                if response.status != 200:
                    return await self._first_completion_failed(f"GET /v1/models: HTTP {response.status}")
                names = [model["id"] for model in (await response.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            return await self._first_completion_failed(f"GET /v1/models: {type(error).__name__} {error}")
        if self.served_model in names:
            return None
        return Failure(
            "client_404_model_name",
            "abort_sweep",
            evidence=f"the server serves {', '.join(map(repr, names))}, not {self.served_model!r}",
            advice="serve.command starts a server of another model: see that it passes its arguments on to vLLM.",
        )

    async def _first_completion_failed(self, problem: str) -> Failure:
        found = await self.failure("start")
        if found.kind not in {"healthy", "other"}:
            return found
        return Failure(
            "other",
            "retry",
            evidence=problem,
            advice="The server came up, but its first answer failed; its log is in server.log.",
            exit_code=self.exit_code,
        )

    def _hung(self, seen: str) -> Failure:
        found = classify(self.log_path, exit_code=None, phase="start", **self._flag_names())
        if found.kind not in {"healthy", "other", "engine_dead"}:
            return found  # the engine said why, and the API server waits for it all the same
        return Failure(
            "hang_timeout",
            "retry",
            evidence=seen,
            advice="If the model is only slow to load, raise serve.start_timeout_s or serve.stall_timeout_s.",
        )

    async def failure(self, phase: Phase) -> Failure:
        """Return why the server, or an answer of it, failed, as far as its log and its exit code say."""
        async with aiohttp.ClientSession(timeout=_HTTP_TIMEOUT, trust_env=False) as session:
            if not await self._healthy(session):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.exited(), _DYING_S)
        found = classify(self.log_path, exit_code=self.exit_code, phase=phase, **self._flag_names())
        if found.kind != "healthy":
            return found
        if self.exit_code is None:
            seen = "the server still runs, and its log shows no error"
        else:
            seen = f"the server ended with exit code {self.exit_code}, and its log shows no error"
        return Failure(
            "other" if self.exit_code is None else "engine_dead",
            "fail_trial",
            evidence=seen,
            advice="Look at the last lines of server.log.",
            phase=phase,
            exit_code=self.exit_code,
        )

    def _flag_names(self) -> dict[str, frozenset[str]]:
        swept = frozenset(self.launch.swept)
        return {"swept": swept, "fixed": frozenset(self.launch.flags) - swept}

    async def facts(self) -> ServerFacts:
        """Return the figures that the log of the start names."""
        facts = await asyncio.to_thread(vllm_log.facts, self.log_path)
        return ServerFacts(**facts._asdict())

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the server has not been started: use `async with Server(…)`")
        return self._process

    def _members(self) -> list[psutil.Process]:
        pgid = None if self._process is None else self._process.pid
        return _members(marker_of(self.launch.trial_dir), pgid)

    async def stop(self) -> tuple[int, ...]:
        """End every process of the launch, and return those that would not die (none, on a sound machine).

        Does its work once, to the end even if the caller is cancelled meanwhile; the cancellation comes after it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        cancelled = False
        while not self._stopping.done():
            try:
                await asyncio.shield(self._stopping)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return self._stopping.result()

    async def _stop(self) -> tuple[int, ...]:
        if self._process is None:
            return await _end_all(self.launch.trial_dir, None)
        await self._ask_to_end(self._process)
        left = await _end_all(self.launch.trial_dir, self._process.pid)
        self.kill()
        if self._process.pid not in left:
            await self._process.wait()
        return left

    async def _ask_to_end(self, process: asyncio.subprocess.Process) -> None:
        # The leader alone first: a second SIGTERM in the middle of its cleaning up would kill the engine.
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.launch.stop_timeout_s)
        _signal_group(process.pid, signal.SIGTERM)
        patience = monotonic() + min(_GROUP_GRACE_S, self.launch.stop_timeout_s)
        while monotonic() < patience:
            if not self._members():
                break
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Kill the whole group at once, whether its leader still lives or not. For those who cannot wait."""
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)


async def kill_leftovers(trial_dir: str) -> tuple[int, ...]:
    """End what is left of a trial whose worker died, and return the processes that would not die."""
    return await _end_all(trial_dir, None)


def marker_of(trial_dir: str) -> str:
    """Return what the processes of this trial carry in their environment; the same for all who know the folder."""
    return hashlib.sha256(str(Path(trial_dir).absolute()).encode()).hexdigest()[:12]


def become_subreaper() -> bool:
    """Make orphans of our children our own children, so that they can be waited for. Linux only; False elsewhere."""
    pr_set_child_subreaper = 36
    libc = ctypes.CDLL(None, use_errno=True)
    return hasattr(libc, "prctl") and libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0


async def _end_all(trial_dir: str, pgid: int | None) -> tuple[int, ...]:
    """Kill until nobody of the launch is left, then remove its temporary folder. A zombie is nobody."""
    marker = marker_of(trial_dir)
    begun = monotonic()
    while (left := _members(marker, pgid)) and monotonic() - begun < _KILL_TIMEOUT_S:
        for process in left:
            with suppress(psutil.Error):
                if monotonic() - begun > _TRACKER_GRACE_S or _TRACKER not in " ".join(process.cmdline()):
                    process.kill()
        await asyncio.sleep(0.05)
        _reap(process.pid for process in left if process.pid != pgid)  # asyncio waits for the leader
    _remove_tmp(marker)
    return tuple(process.pid for process in left)


def _remove_tmp(marker: str) -> None:
    for folder in Path(_tmp_root()).glob(f"{_tmp_prefix(marker)}*"):
        if folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _members(marker: str, pgid: int | None) -> list[psutil.Process]:
    """Return the living processes that belong to the group or carry the marker."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(process.pid) == pgid or process.environ().get(MARKER) == marker:
                found.append(process)
    return found


def _reap(pids: Iterable[int]) -> None:
    """Wait for orphans that have become our children, so that no zombies pile up."""
    for pid in pids:
        with suppress(ChildProcessError):  # not our child, and so not ours to wait for
            os.waitpid(pid, os.WNOHANG)


def _signal_group(pgid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tmp_root() -> str:
    root = tempfile.gettempdir()
    return root if len(root) <= _LONGEST_TMP else "/tmp"  # noqa: S108  (mkdtemp makes the folder below it)


def _tmp_prefix(marker: str) -> str:
    return f"sweep-{marker}-"
