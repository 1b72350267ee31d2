"""The reference server: connections, endpoints, and the streams that are written at their time."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.refserver.events import NUMBER, Asked, error_body
from tests.refserver.metrics import Metrics
from tests.refserver.reactor import Reactor
from tests.refserver.scenarios import SCENARIOS, Scenario
from tests.refserver.script import FIRST, Script, Write, answer, script
from tests.refserver.timing import Schedule, Timing
from tests.refserver.truth import Entry, Truth

_NS = 1_000_000_000
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
_SPACE = socket.CMSG_SPACE(_TIMESPEC.size)
_HEADER = re.compile(rb"^([^:\r\n]+):[ \t]*(.*?)[ \t]*\r$", re.MULTILINE)
_PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_JSON_COMPLETION = Scenario(json_body=True, expected="ok")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides."""

    timing: Timing = field(default_factory=Timing)
    model: str = "m"
    scenario: str = "normal"
    every: int = 1  # the scenario is played to every so many requests
    tokens_per_chunk: int = 1
    natural_ends: bool = False
    keep_alive_s: float = 5.0
    freeze: tuple[float, float] | None = None  # (seconds after the first request, length in seconds)


class Server:
    """Everything that connections share."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reactor = Reactor()
        self.truth = Truth()
        self.metrics = Metrics(options.model)
        self.plays: deque[tuple[str, int]] = deque()  # (scenario, split) of the next requests, one each
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._offset_ns = 0
        self._offset_at_ns = 0

    def listen(self, port: int) -> int:
        """Start to listen on the loopback interface; returns the port."""
        listener = self._listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(4096)
        listener.setblocking(False)
        self.reactor.watch(listener.fileno(), select.EPOLLIN, lambda _events: self._accept())
        return int(listener.getsockname()[1])

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                Connection(self, sock)

    def monotonic_ns(self, wall_ns: int) -> int:
        """Turn a stamp of the kernel into `perf_counter_ns`; the distance of the clocks is measured every second."""
        now = time.perf_counter_ns()
        if now - self._offset_at_ns > _NS:
            self._offset_ns = min(time.time_ns() - time.perf_counter_ns() for _ in range(50))
            self._offset_at_ns = now
        return min(wall_ns - self._offset_ns, now)

    def freeze(self, seconds: float) -> None:
        self.reactor.frozen_until_ns = time.perf_counter_ns() + round(seconds * _NS)

    def begin(self, entry: Entry) -> None:
        if entry.ordinal == 0 and self.options.freeze:
            after_s, length_s = self.options.freeze
            self.reactor.at(entry.received_ns + round(after_s * _NS), lambda _due: self.freeze(length_s))
        self.truth.entries.append(entry)
        self.metrics.running += 1
        self.metrics.queried_tokens += entry.prompt_tokens

    def get(self, path: str) -> bytes:
        if path == "/health":
            return answer(200, b"")
        if path == "/metrics":
            return answer(200, self.metrics.render(), kind="text/plain; version=0.0.4; charset=utf-8")
        if path == "/truth":
            return answer(200, json.dumps(self.truth.document()).encode())
        if path == "/v1/models":
            card = {"id": self.options.model, "object": "model", "owned_by": "vllm", "max_model_len": 32768}
            return answer(200, json.dumps({"object": "list", "data": [card]}).encode())
        return answer(404, b'{"detail":"Not Found"}', "Not Found")

    def post(self, target: str, body: bytes) -> bytes:
        url = urlsplit(target)
        if url.path == "/play":
            self.plays = deque((str(name), int(split)) for name, split in json.loads(body))
            return answer(200, b"")
        if url.path == "/truth/reset":
            self.truth.reset()
            return answer(200, b"")
        if url.path == "/freeze":
            self.freeze(float(parse_qs(url.query)["seconds"][0]))
            return answer(200, b"")
        return answer(404, b'{"detail":"Not Found"}', "Not Found")


class Connection:
    """A socket of a client. Writes go to the kernel at once; what it does not take waits for it."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.accepted_ns = time.perf_counter_ns()
        self.closed = False
        self.stream: Stream | None = None
        self.requests = 0
        self._server, self._sock = server, sock
        self._received = bytearray()
        self._received_ns = 0
        self._unsent = b""
        self._last_words = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        server.reactor.watch(sock.fileno(), select.EPOLLIN, self._on_events)

    def send(self, data: bytes) -> None:
        try:
            taken = 0 if self._unsent else self._sock.send(data)
        except BlockingIOError:
            taken = 0
        except OSError:
            self.close()
            return
        if taken < len(data):
            self._unsent += data[taken:]
            self._server.reactor.rewatch(self._sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self, *, reset: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        if self.stream is not None:
            self.stream.end("left")
        self._server.reactor.unwatch(self._sock.fileno())
        if reset:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def close_when_sent(self) -> None:
        self._last_words = True
        if not self._unsent:
            self.close()

    def close_when_idle(self) -> None:
        """Close some time from now, unless there is another request by then."""
        seen = self.requests
        due_ns = time.perf_counter_ns() + round(self._server.options.keep_alive_s * _NS)
        self._server.reactor.at(due_ns, lambda _due: self.close() if self.requests == seen else None)

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLOUT and self._unsent:
            unsent, self._unsent = self._unsent, b""
            self._server.reactor.rewatch(self._sock.fileno(), select.EPOLLIN)
            self.send(unsent)
            if self._last_words and not self._unsent:
                self.close()
        if events & ~select.EPOLLOUT and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(262144, _SPACE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received_ns = time.perf_counter_ns()
        for level, kind, stamp in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp[: _TIMESPEC.size])
                self._received_ns = self._server.monotonic_ns(seconds * _NS + nanoseconds)
        self._received += data
        self._take_requests()

    def _take_requests(self) -> None:
        while not self.closed and (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[: head_end + 2])
            line, _, rest = head.partition(b"\r\n")
            headers = {name.lower().decode(): value.decode() for name, value in _HEADER.findall(rest)}
            end = head_end + 4 + int(headers.get("content-length", 0))
            if len(self._received) < end:
                return
            body = bytes(self._received[head_end + 4 : end])
            del self._received[:end]
            self.requests += 1
            method, target, _ = line.decode().split(" ", 2)
            self._answer(method, target, headers, body)

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        if method == "POST" and target in _PATHS:
            try:
                document = json.loads(body)
            except ValueError:
                self.send(answer(400, error_body("JSON decode error", "BadRequestError", 400), "Bad Request"))
                return
            self._generate(_PATHS[target], headers, document)
            return
        self.send(self._server.post(target, body) if method == "POST" else self._server.get(target))
        if headers.get("connection", "").lower() == "close":
            self.close_when_sent()
        else:
            self.close_when_idle()

    def _generate(self, endpoint: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        server = self._server
        ordinal = server.truth.ordinal
        server.truth.ordinal += 1
        model, _, query = str(body.get("model")).partition("?")
        if model != server.options.model:
            words = f"The model `{body.get('model')}` does not exist."
            self.send(answer(404, error_body(words, "NotFoundError", 404), "Not Found"))
            return
        name, split = server.plays.popleft() if server.plays else _scenario(server.options, headers, query, ordinal)
        asked = _asked(server.options, endpoint, body, ordinal)
        found, _, after = name.partition(":")
        scenario = SCENARIOS[found] if body.get("stream") else _JSON_COMPLETION
        play = script(scenario, asked, server.options.model, int(after or 2), split)
        entry = Entry(
            ordinal=ordinal,
            x_request_id=headers.get("x-request-id", ""),
            endpoint=endpoint,
            scenario=name,
            expected=play.expected,
            prompt_tokens=asked.prompt_tokens,
            asked_tokens=asked.tokens,
            accepted_ns=self.accepted_ns,
            received_ns=self._received_ns,
        )
        server.begin(entry)
        self.stream = Stream(server, self, entry, play, asked.finish_reason)
        self.stream.go_on()


def _scenario(options: Options, headers: dict[str, str], query: str, ordinal: int) -> tuple[str, int]:
    """Return (scenario, split): of a header, of what follows a "?" in the model's name, or of the command line."""
    asked = {key: values[0] for key, values in parse_qs(query).items()} if query else {}
    default = options.scenario if ordinal % options.every == options.every - 1 else "normal"
    name = headers.get("x-scenario") or asked.get("scenario") or default
    return name, int(headers.get("x-split") or asked.get("split") or 0)


def _asked(options: Options, endpoint: str, body: dict[str, Any], ordinal: int) -> Asked:
    wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
    reason = "length"
    if options.natural_ends and not body.get("ignore_eos"):
        draw = random.Random((options.timing.seed << 40) ^ ~ordinal).randint(1, wanted)
        tokens = max(draw, int(body.get("min_tokens") or 0))
        reason = "stop" if tokens < wanted else "length"
    else:
        tokens = wanted
    stream_options = body.get("stream_options") or {}
    return Asked(
        chat=endpoint == "chat",
        prompt_tokens=_prompt_tokens(body),
        tokens=tokens,
        finish_reason=reason,
        exact=bool(body.get("ignore_eos")),
        ids=bool(body.get("return_token_ids")),
        usage=bool(stream_options.get("include_usage")),
        continuous=bool(stream_options.get("continuous_usage_stats")),
        per_chunk=options.tokens_per_chunk,
    )


def _prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    return 4 + sum(len(str(message.get("content")).split()) for message in body.get("messages") or [])


class Stream:
    """An answer under way."""

    __slots__ = (
        "_connection",
        "_entry",
        "_not_before_ns",
        "_number",
        "_position",
        "_reason",
        "_schedule",
        "_script",
        "_server",
    )

    def __init__(self, server: Server, connection: Connection, entry: Entry, play: Script, reason: str) -> None:
        self._server, self._connection, self._entry, self._script = server, connection, entry, play
        self._reason = reason
        self._number = f"{entry.ordinal:0{len(NUMBER)}x}".encode()
        self._schedule = Schedule(server.options.timing, entry.ordinal, entry.received_ns)
        self._position = 0
        self._not_before_ns = 0

    def go_on(self) -> None:
        """Wait for the next write, or end."""
        writes = self._script.writes
        if self._position == len(writes):
            self._finish()
            return
        write = writes[self._position]
        due_ns = self._due_ns(write)
        if due_ns is None:
            self._write(self._entry.received_ns)
        else:
            self._server.reactor.at(due_ns, self._write)

    def _due_ns(self, write: Write) -> int | None:
        """Return when a write is due; None where it follows at once."""
        due_ns = None
        if write.wait:
            due_ns = self._schedule.first_ns() if write.wait == FIRST else self._schedule.later_ns(write.wait)
        if write.pause_ns:
            self._not_before_ns = due_ns = (due_ns or time.perf_counter_ns()) + write.pause_ns
        return None if due_ns is None else max(due_ns, self._not_before_ns)

    def _write(self, due_ns: int) -> None:
        """Write what is due, and what follows it at once."""
        connection, writes = self._connection, self._script.writes
        while not connection.closed:
            write = writes[self._position]
            data = write.data.replace(NUMBER, self._number)
            before_ns = time.perf_counter_ns()
            connection.send(data)
            if write.marks:
                self._note(write, due_ns, before_ns)
            self._position += 1
            if self._position == len(writes) or writes[self._position].wait or writes[self._position].pause_ns:
                self.go_on()
                return

    def _note(self, write: Write, due_ns: int, before_ns: int) -> None:
        self._server.truth.note_write(due_ns, before_ns, time.perf_counter_ns())
        if not self._entry.writes:
            self._server.metrics.first_token(self._entry, before_ns)
        for _, count in write.marks:
            self._entry.writes.append((before_ns, count))
            self._entry.scheduled_ns.append(due_ns)
            self._server.metrics.generated_tokens += count

    def _finish(self) -> None:
        end = self._script.end
        if end == "hang":
            self._entry.ended = "hung"
            return
        self.end("done")
        connection = self._connection
        if end == "keep":
            connection.close_when_idle()
        elif end == "close":
            connection.close_when_sent()
        else:
            connection.close(reset=True)

    def end(self, how: str) -> None:
        """Close the books on this answer."""
        self._connection.stream = None
        self._entry.ended = how if self._entry.ended == "open" else self._entry.ended
        self._entry.ended_ns = time.perf_counter_ns()
        self._server.metrics.running -= 1
        if how == "done":
            self._server.metrics.finished(self._entry, self._reason)
