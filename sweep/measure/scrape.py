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

from sweep.measure.prom import GAUGES, Samples, parse, total

_TIMEOUT_S = 5.0
_INTERVAL_S = 1.0  # the server renders its metrics on the loop that also answers requests


async def fetch(url: str, api_key: str | None = None) -> str:
    """Fetch /metrics. Raises OSError where there is none, or TimeoutError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session,
            session.get(url) as response,
        ):
            if response.status != 200:
                raise ConnectionError(f"{url}: HTTP {response.status}")
            return await response.text()
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
        self._turn = asyncio.Lock()  # a scrape out of turn may meet the regular one; they are kept in order

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

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.scrape()

    async def scrape(self) -> None:
        """Scrape now, as at the edges of a window."""
        with suppress(OSError, TimeoutError, ValueError):
            async with self._turn:
                asked_ns = time.perf_counter_ns()
                text = await fetch(self._url, self._api_key)
                # The server read its counters somewhere in between.
                at_ns = (asked_ns + time.perf_counter_ns()) // 2
                samples = parse(text)
                self.scrapes.append((at_ns, samples))
            self._write(at_ns, samples)

    def _write(self, at_ns: int, samples: Samples) -> None:
        if self._file is not None:
            seen = {
                field.removesuffix("_peak").replace("_peak_", "_"): total(samples, name)
                for field, name in GAUGES.items()
            }
            self._file.write(json.dumps({"t_ns": at_ns} | seen) + "\n")
            self._file.flush()
