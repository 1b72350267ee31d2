"""A client that is nothing but a socket: it keeps every read with the kernel's stamp, and knows no framing."""

from __future__ import annotations

import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Answer:
    """sent_ns, and (arrival, bytes) of each read, as `perf_counter_ns`. closed: the server closed it."""

    sent_ns: int
    reads: tuple[tuple[int, bytes], ...]
    closed: bool

    @property
    def data(self) -> bytes:
        return b"".join(data for _, data in self.reads)


def request(url: str, endpoint: str, tokens: int, *headers: str, **fields: Any) -> bytes:
    """Return the bytes of a streaming request; fields add to its body."""
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    prompt = {"messages": [{"role": "user", "content": "one two"}]} if endpoint == "chat" else {"prompt": [1000, 1001]}
    payload = json.dumps(body | prompt | fields).encode()
    lines = [f"POST {PATHS[endpoint]} HTTP/1.1", f"Host: {urlsplit(url).netloc}", f"Content-Length: {len(payload)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + payload


def connect(url: str, timeout_s: float = 10) -> socket.socket:
    host, _, port = urlsplit(url).netloc.partition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def _arrival_ns(ancillary: list[tuple[int, int, bytes]], offset_ns: int) -> int:
    """Return the kernel's stamp, or now: the kernel begins to stamp a little after the first socket asked for it."""
    for _, kind, stamp in ancillary:
        if kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(stamp[: _TIMESPEC.size])
            return int(seconds * 1_000_000_000 + nanoseconds - offset_ns)
    return time.perf_counter_ns()


def exchange(sock: socket.socket, sent: bytes, until: bytes = b"\r\n0\r\n\r\n") -> Answer:
    """Send, and read until the bytes `until` end what came, the server closes, or the socket's time-out."""
    offset_ns = min(time.time_ns() - time.perf_counter_ns() for _ in range(50))
    sent_ns = time.perf_counter_ns()
    sock.sendall(sent)
    reads: list[tuple[int, bytes]] = []
    tail = b""
    closed = False
    with suppress(TimeoutError):
        while not tail.endswith(until):
            try:
                data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(_TIMESPEC.size))
            except ConnectionResetError:
                data = b""
            if not data:
                closed = True
                break
            reads.append((_arrival_ns(ancillary, offset_ns), data))
            tail = (tail + data)[-len(until) :]
    return Answer(sent_ns, tuple(reads), closed)
