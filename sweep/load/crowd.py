"""The processes of the load client, seen from the one that conducts them."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from sweep.children import packed, python_env, receive
from sweep.errors import MachineError
from sweep.load.messages import Command, Progress, Ready, Result, Setup

_LEAVE_S = 5.0
_SILENT_S = 120.0  # a process tells every second how far it is, and is silent only while it puts its records together


class Crowd:
    """Processes that each carry a share of one load. They leave when this context ends, however it ends."""

    def __init__(self, setups: list[Setup]) -> None:
        self.progress = [Progress() for _ in setups]
        self.results: list[Result | None] = [None for _ in setups]
        # What each process had summed up at the end of each bin of time: (bytes, flight_ns).
        self.sums: list[list[tuple[int, int]]] = [[(0, 0)] for _ in setups]
        self._setups = setups
        self._processes: list[Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ready = 0
        self._heard = [time.monotonic() for _ in setups]
        self._changed = asyncio.Event()
        self._dead: str | None = None

    async def __aenter__(self) -> Self:
        try:
            for number, setup in enumerate(self._setups):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "sweep.load.generator",
                    stdin=PIPE,
                    stdout=PIPE,
                    env=python_env(),
                    start_new_session=True,  # a Ctrl-C is for the one that conducts
                )
                self._processes.append(process)
                assert process.stdin is not None
                process.stdin.write(packed(setup))
                reader = asyncio.create_task(self._listen(number, process))
                reader.add_done_callback(lambda _: self._changed.set())
                self._readers.append(reader)
            while self._ready < len(self._setups):
                await self.news(None)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    def tell(self, command: Command) -> None:
        """Send a command to all. One that has died is found by the next `news`."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(packed(command))

    async def news(self, timeout_s: float | None) -> bool:
        """Wait for a message of any process; False if the time ran out. Raises MachineError if a process died."""
        patience_s = _SILENT_S if timeout_s is None else timeout_s
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), patience_s)
        awaited = [heard for heard, result in zip(self._heard, self.results, strict=True) if result is None]
        quietest_s = time.monotonic() - min(awaited, default=time.monotonic())
        if quietest_s > _SILENT_S:
            raise MachineError(
                f"a process of the load client has not been heard of for {quietest_s:.0f} s: was it stopped?"
            )
        news = self._changed.is_set()
        self._changed.clear()
        for reader in self._readers:
            if reader.done():
                reader.result()  # a message that could not be read
        if self._dead is not None:
            raise MachineError(self._dead)
        return news

    @property
    def bins(self) -> int:
        """How many bins of time have ended for all."""
        return min(len(sums) for sums in self.sums) - 1

    def sum_at(self, number: int) -> tuple[int, int]:
        """Return (bytes, flight_ns) of all since the start, at the end of a bin that has ended for all."""
        return sum(sums[number][0] for sums in self.sums), sum(sums[number][1] for sums in self.sums)

    async def _listen(self, number: int, process: Process) -> None:
        assert process.stdout is not None
        while (message := await receive(process.stdout)) is not None:
            self._heard[number] = time.monotonic()
            self._take(number, message)
            self._changed.set()
        if self.results[number] is None:
            code = await process.wait()
            self._dead = f"a process of the load client died (exit code {code}). " + (
                "A killed one points to the host's memory: ask for fewer or shorter requests."
                if code < 0
                else "Its last words stand above, or in the trial's worker.log."
            )

    def _take(self, number: int, message: Any) -> None:
        match message:
            case Progress():
                self.progress[number] = message
                if message.bins == len(self.sums[number]):
                    self.sums[number].append((message.bytes, message.flight_ns))
            case Result():
                self.results[number] = message
            case Ready():
                self._ready += 1

    async def _leave(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), _LEAVE_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
