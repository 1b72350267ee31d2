"""The load client: OpenAI's streaming API over aiohttp, on one event loop."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from sweep.load.attempt import Attempt, record
from sweep.load.level import LevelRun, Warmup
from sweep.load.prompts import Prompt, PromptSource
from sweep.load.sse import error_words
from sweep.load.stamps import StampClock, StampedSocket, allow_open_files, socket_factory
from sweep.load.workload import Level, LoadSection
from sweep.model import LoadRun, RequestRecord

__all__ = ["PromptSource", "Target", "Warmup", "complete_once", "probe", "run_level", "served_models"]

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_READ_BUFFER_BYTES = 4 * 2**20  # a stream that waits for the client must not be stopped by it
_KEEP_ALIVE_S = 4.0  # below the 5 s after which vLLM closes idle connections, or a request may meet a closing one
_CONNECT_TIMEOUT_S = 30.0
_QUICK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint. base_url: without /v1. vllm: it knows the fields that only vLLM has."""

    base_url: str
    model: str
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    vllm: bool = True

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path


class _Connector(aiohttp.TCPConnector):
    """Remembers which socket each task was given, since a short answer has released it before one could look."""

    def __init__(self, clock: StampClock) -> None:
        self._opened: dict[int, StampedSocket] = {}
        self.given: dict[asyncio.Task[Any] | None, StampedSocket] = {}
        super().__init__(
            limit=0,
            ttl_dns_cache=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            socket_factory=socket_factory(clock, self._opened),
        )

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        if connection.transport is not None:
            fd = connection.transport.get_extra_info("socket").fileno()
            self.given[asyncio.current_task()] = self._opened[fd]
        return connection


class _Wire:
    """Sends requests and notes when what happened."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, connector: _Connector, salt: str) -> None:
        self.target, self._session, self._connector, self._salt = target, session, connector, salt
        self._url = target.url(_PATHS[target.endpoint])

    async def send(self, attempt: Attempt, prompt: Prompt, on_bytes: Callable[[int, int], None]) -> None:
        """Send a request and take in its answer as raw bytes. What goes wrong becomes the attempt's status."""
        body = json.dumps(_body(self.target, prompt, attempt.requested_tokens, self._salt)).encode()
        task = asyncio.current_task()
        try:
            await self._exchange(attempt, body, task, on_bytes)
        except (aiohttp.ClientError, OSError) as error:
            attempt.status = "truncated" if attempt.t_headers_ns else "connect"
            attempt.error = error_words(f"{type(error).__name__}: {error}")
        finally:
            sock = self._connector.given.pop(task, None)
            if sock and sock.sent_ns >= attempt.t_start_ns:  # else nothing was sent on it in this turn
                attempt.t_send_ns = sock.sent_ns

    async def _exchange(
        self, attempt: Attempt, body: bytes, task: asyncio.Task[Any] | None, on_bytes: Callable[[int, int], None]
    ) -> None:
        headers = {"X-Request-Id": attempt.request_id}
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            # A task goes on before the next read of its socket, so the socket's latest stamp is that of what it got.
            sock = self._connector.given[task]
            attempt.t_headers_ns = sock.received_ns or time.perf_counter_ns()
            if response.status != 200:
                attempt.status = f"http_{response.status}"
                attempt.error = _words_of(await response.content.read(4096))
                return
            content, pieces = response.content, attempt.pieces
            while data := await content.readany():
                at = sock.received_ns or time.perf_counter_ns()
                pieces.append((at, data))
                on_bytes(len(data), at)


def _body(target: Target, prompt: Prompt, max_tokens: int, salt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        body["prompt"] = prompt.content
    if target.vllm:
        body |= {"min_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, "cache_salt": salt}
    return body


def _words_of(body: bytes) -> str:
    try:
        return error_words(json.loads(body))
    except ValueError:
        return error_words(body.decode(errors="replace"))


@asynccontextmanager
async def _session(target: Target, connector: aiohttp.TCPConnector) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    session = aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        read_bufsize=_READ_BUFFER_BYTES,
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding",),
    )
    async with session:
        yield session


async def served_models(target: Target) -> list[str]:
    """Ask /v1/models which names the server answers to. Raises OSError, TimeoutError or ValueError with its words."""
    async with _session(target, aiohttp.TCPConnector()) as session, asyncio.timeout(_QUICK_TIMEOUT_S):
        try:
            async with session.get(target.url("/v1/models")) as response:
                body = await response.read()
                if response.status != 200:
                    raise ValueError(f"HTTP {response.status}: {_words_of(body)}")
                return [str(card["id"]) for card in json.loads(body)["data"]]
        except aiohttp.ClientError as error:
            raise ConnectionError(error_words(str(error))) from error
        except (KeyError, TypeError) as error:
            raise ValueError("the answer is no list of models") from error


async def complete_once(target: Target, prompt: list[int] | str, max_tokens: int) -> RequestRecord:
    """Run one real completion: only its answer proves that a server is ready."""
    connector = _Connector(StampClock())
    attempt = Attempt(
        request_id=f"warmup-{uuid.uuid4().hex[:12]}",
        counted=False,
        prompt_tokens=len(prompt.split()) if isinstance(prompt, str) else len(prompt),
        prefix_group=None,
        requested_tokens=max_tokens,
        t_start_ns=time.perf_counter_ns(),
    )
    async with _session(target, connector) as session:
        wire = _Wire(target, session, connector, attempt.request_id)
        await wire.send(attempt, Prompt(prompt, attempt.prompt_tokens, None), lambda _count, _at: None)
    attempt.t_end_ns = time.perf_counter_ns()
    return record(attempt, vllm=target.vllm)


async def probe(target: Target, ids: list[int], text: str, max_tokens: int) -> tuple[Target, RequestRecord]:
    """Find out by real completions whether the server knows vLLM's fields; a server that does not is asked plainly."""
    asked = replace(target, vllm=True)
    first = await complete_once(asked, text if target.endpoint == "chat" else ids, max_tokens)
    if first.status not in {"http_400", "http_422"}:
        return asked, first
    plain = replace(target, vllm=False)
    return plain, await complete_once(plain, text, max_tokens)


async def run_level(
    target: Target,
    level: Level,
    load: LoadSection,
    *,
    prompts: PromptSource,
    workload_seed: int,
    warmup: Warmup,
    on_window: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Put one level of load on the server: warm up, count the requests of the window, keep the load up until they end.

    on_window: called when the window opens; must not take any time.

    The load ends early, with what there is, when the server is plainly gone. Raises ConfigError where this process may
    not open enough connections.
    """
    allow_open_files(level.concurrency)
    clock = StampClock()
    connector = _Connector(clock)
    async with _session(target, connector) as session:
        wire = _Wire(target, session, connector, salt=uuid.uuid4().hex)

        async def send(attempt: Attempt, prompt: Prompt) -> None:
            await wire.send(attempt, prompt, run.received)

        run = LevelRun(
            level=level,
            load=load,
            warmup=warmup,
            prompts=prompts,
            workload_seed=workload_seed,
            send=send,
            on_window=on_window,
        )
        cpu_s = time.process_time()
        async with _synchronised(clock):
            await run.run()
        cpu_s = time.process_time() - cpu_s
    return LoadRun(
        level=level.name,
        records=tuple(record(attempt, vllm=target.vllm) for attempt in run.attempts),
        start_ns=run.start_ns,
        window_start_ns=run.window_start_ns,
        window_end_ns=run.window_end_ns,
        end_ns=run.end_ns,
        steady=run.steady,
        stamp_source=clock.source,
        cpu_s=cpu_s,
        prefix_tokens=load.prompt.shared_prefix,
        ended_early=run.ended_early,
    )


@asynccontextmanager
async def _synchronised(clock: StampClock) -> AsyncIterator[None]:
    """Keep the clock's offset fresh: wall clocks are slewed."""

    async def again() -> None:
        while True:
            await asyncio.sleep(1)
            clock.synchronise()

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
