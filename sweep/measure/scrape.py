"""Reads a server's /metrics, once or once a second."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import aiohttp

from sweep.measure.prom import GAUGES, Samples, parse, server_stats, total
from sweep.model import ServerStats

_TIMEOUT_S = 5.0
_INTERVAL_S = 1.0  # the server renders its metrics on the loop that also answers requests


async def scrape(url: str, api_key: str | None = None) -> Samples:
    """Fetch and parse /metrics. Raises OSError where there is none, TimeoutError, or ValueError for other text."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session,
            session.get(url) as response,
        ):
            if response.status != 200:
                raise ConnectionError(f"{url}: HTTP {response.status}")
            return parse(await response.text())
    except aiohttp.ClientError as error:
        raise ConnectionError(f"{url}: {error}") from error


class Scraper:
    """Scrapes once a second between its beginning and its end; a server that does not answer leaves a gap.

    url: of /metrics. path: takes the gauges, one JSON object a line; None writes nothing.
    """

    def __init__(self, url: str, api_key: str | None = None, path: Path | None = None) -> None:
        self.scrapes: list[tuple[int, Samples]] = []  # (perf_counter_ns, samples)
        self._url, self._api_key, self._path = url, api_key, path
        self._file: TextIO | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()

    def soon(self) -> None:
        """Scrape out of turn, as at the beginning of a window."""
        self._wanted.set()

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._file = self._path.open("a", encoding="utf-8")
        await self.scrape()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if kind is None:
            await self.scrape()
        if self._file is not None:
            self._file.close()

    def window(self, start_ns: int, end_ns: int) -> ServerStats | None:
        """Return what happened between two times, by the scrapes nearest to them; None without two scrapes."""
        if len(self.scrapes) < 2:
            return None
        first, last = (
            min(range(len(self.scrapes)), key=lambda i: abs(self.scrapes[i][0] - at_ns)) for at_ns in (start_ns, end_ns)
        )
        if first == last:
            return None
        between = [samples for _, samples in self.scrapes[first : last + 1]]
        return server_stats(between[0], between[-1], between)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), _INTERVAL_S)
            self._wanted.clear()
            await self.scrape()

    async def scrape(self) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            samples = await scrape(self._url, self._api_key)
            now = time.perf_counter_ns()
            self.scrapes.append((now, samples))
            if self._file is not None:
                seen = {
                    field.removesuffix("_peak").replace("_peak_", "_"): total(samples, n) for field, n in GAUGES.items()
                }
                self._file.write(json.dumps({"t_ns": now} | seen) + "\n")
                self._file.flush()
