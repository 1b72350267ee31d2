"""One request over HTTP: OpenAI's streaming API on aiohttp, with a stamp for every read of an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from sweep.load.attempt import Attempt
from sweep.load.plan import Ask
from sweep.load.prompts import Prompt
from sweep.load.sse import Mark, error_words
from sweep.load.stamps import StampClock, StampedSocket

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_READ_BUFFER_BYTES = 2**30  # an answer is taken in whole; a limit would stop the stream that is to be measured
_KEEP_ALIVE_S = 4.0  # below the 5 s after which vLLM closes idle connections, or a request may meet a closing one
_CONNECT_TIMEOUT_S = 30.0


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


class Meter:
    """What has come in, on all streams together; written by every read, so it does next to nothing."""

    __slots__ = ("bytes", "last_ns", "longest_quiet_ns")

    def __init__(self) -> None:
        self.bytes = 0
        self.last_ns = 0  # of the latest byte, or the time at which the server got something to do again
        self.longest_quiet_ns = 0


class _Handler(ResponseHandler):
    """Notes for each read of an answer when it arrived and how far the body has come.

    aiohttp gathers the body by itself, so no task is woken before the answer has ended: half of the cost of a stream.
    """

    sock: StampedSocket
    marks: list[Mark]

    def __init__(self, loop: asyncio.AbstractEventLoop, meter: Meter, opened: Mapping[int, StampedSocket]) -> None:
        super().__init__(loop)
        self._meter, self._opened = meter, opened
        self.marks = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.sock = self._opened[transport.get_extra_info("socket").fileno()]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.exception() is not None and self._payload is not None and not self._payload.is_eof():
            # What broke off is no HTTP; aiohttp tells its own reader, but not one who waits for the end.
            self._payload.set_exception(aiohttp.ClientPayloadError("the answer is no HTTP"))
        at = self.sock.received_ns or time.perf_counter_ns()
        if self._payload is not None:
            self.marks.append((at, self._payload.total_bytes, self.sock.waited_ns))
        meter = self._meter
        meter.bytes += len(data)
        meter.longest_quiet_ns = max(meter.longest_quiet_ns, at - meter.last_ns)
        meter.last_ns = at


class _Connector(aiohttp.TCPConnector):
    """Makes stamped connections, and remembers which one each task was given: a short answer has soon released it."""

    def __init__(self, clock: StampClock, meter: Meter) -> None:
        opened: dict[int, StampedSocket] = {}

        def make(address: tuple[Any, ...]) -> StampedSocket:
            sock = StampedSocket(clock, *address[:3])
            opened[sock.fileno()] = sock
            return sock

        super().__init__(limit=0, ttl_dns_cache=None, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=make)
        self._factory: Any = partial(_Handler, asyncio.get_running_loop(), meter, opened)
        self.given: dict[asyncio.Task[Any] | None, _Handler] = {}

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*args, **kwargs)
        handler = connection.protocol
        if isinstance(handler, _Handler):
            handler.marks = []
            self.given[asyncio.current_task()] = handler
        return connection


class Wire:
    """Sends requests to one endpoint and takes in their answers as raw bytes."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, connector: _Connector, salt: str) -> None:
        self.target, self._session, self._connector, self._salt = target, session, connector, salt
        self._url = target.url(_PATHS[target.endpoint])

    async def send(self, attempt: Attempt) -> None:
        """Send a request and take in its answer. What goes wrong becomes the attempt's status."""
        task, began_ns = asyncio.current_task(), time.perf_counter_ns()
        try:
            body = msgspec.json.encode(_body(self.target, attempt.ask, attempt.prompt, self._salt))
        except ValueError as error:
            attempt.status, attempt.error = "unsendable", f"{type(error).__name__}: the request is no JSON in UTF-8"
            return
        try:
            await self._exchange(attempt, body, task)
        except (aiohttp.ClientError, OSError) as error:
            attempt.status = attempt.status or ("truncated" if self._was_answered(task) else "connect")
            attempt.error = attempt.error or error_words(f"{type(error).__name__}: {error}")
        finally:
            handler = self._connector.given.pop(task, None)
            if handler is not None and handler.sock.sent_ns >= began_ns:  # else nothing was sent in this turn
                attempt.t_send_ns = handler.sock.sent_ns

    def _was_answered(self, task: asyncio.Task[Any] | None) -> bool:
        handler = self._connector.given.get(task)
        return handler is not None and handler.sock.received_ns > handler.sock.sent_ns > 0

    async def _exchange(self, attempt: Attempt, body: bytes, task: asyncio.Task[Any] | None) -> None:
        headers = {"X-Request-Id": attempt.request_id}
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            content, handler = response.content, self._connector.given[task]
            attempt.marks = handler.marks
            attempt.t_headers_ns = attempt.marks[0][0] if attempt.marks else time.perf_counter_ns()
            if response.status != 200:
                attempt.status = f"http_{response.status}"
                attempt.error = words_of(await content.read(4096))
                return
            try:
                await content.wait_eof()
            finally:
                # The public way raises if the answer was cut off, and calls the parser again for each piece of it.
                attempt.body = b"".join(content._buffer)  # noqa: SLF001


def _body(target: Target, ask: Ask, prompt: Prompt, salt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": ask.adapter or target.model,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages" if target.endpoint == "chat" else "prompt": prompt.content,
    }
    if target.endpoint == "chat" and isinstance(prompt.content, str):
        body["messages"] = [{"role": "user", "content": prompt.content}]
    if target.vllm:
        body |= {"return_token_ids": True, "cache_salt": salt + ask.salt}
        if not ask.natural:
            body |= {"min_tokens": ask.output_tokens, "ignore_eos": True}
    return body | dict(ask.fields)


def words_of(body: bytes) -> str:
    """Return what the body of an answer that is no success says."""
    try:
        return error_words(json.loads(body))
    except ValueError:
        return error_words(body.decode(errors="replace"))


@asynccontextmanager
async def open_session(target: Target, connector: aiohttp.TCPConnector) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the target's key, and without limits of its own."""
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


@asynccontextmanager
async def open_wire(target: Target, clock: StampClock, meter: Meter, salt: str) -> AsyncIterator[Wire]:
    """Open what requests are sent by. salt: of the prefix cache, which is shared only by requests of one salt."""
    connector = _Connector(clock, meter)
    async with open_session(target, connector) as session:
        yield Wire(target, session, connector, salt)
