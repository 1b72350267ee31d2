"""From a scenario to the writes of an answer: which bytes, after what wait, and which tokens are whole with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from tests.refserver.events import DONE, STREAM_ERROR, Asked, Events, error_body
from tests.refserver.scenarios import Scenario

FIRST = -1  # a wait: until the first token is due
_PAUSE_NS = 1_500_000  # between the parts of an event that must arrive in two reads
_LATE_HEAD_NS = 20_000_000
_REASONS = {400: "Bad Request", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}
_ERRORS = {
    400: ("This model's maximum context length is 2048 tokens.", "BadRequestError"),
    429: ("Too many requests.", "TooManyRequestsError"),
    500: ("EngineCore encountered an issue.", "InternalServerError"),
    503: ("The server is overloaded or not ready yet.", "ServiceUnavailableError"),
}


@dataclass(frozen=True, slots=True)
class Write:
    """wait: FIRST, or for how many tokens' gaps after the write before; pause_ns is added, and shifts nothing later.

    marks: (offset in data behind an event, its tokens), of the events that have tokens.
    """

    data: bytes
    wait: int = 0
    pause_ns: int = 0
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """end: what happens to the connection after the last write; "hang" leaves the answer unfinished."""

    writes: tuple[Write, ...]
    end: Literal["keep", "close", "reset", "hang"]
    expected: str
    tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One event of the stream, or something like one."""

    data: bytes
    wait: int = 0
    tokens: int = 0


@lru_cache(maxsize=4096)
def script(scenario: Scenario, asked: Asked, model: str, after: int, split: int) -> Script:
    """Return the answer. after: tokens before a scenario's stop; split: offset of a cut in the whole answer, or 0."""
    asked = replace(
        asked,
        ids=asked.ids and scenario.ids,
        continuous=asked.continuous or scenario.usage == "every",
        usage=asked.usage and scenario.usage != "never",
        per_chunk=scenario.per_chunk or asked.per_chunk,
    )
    expected = scenario.right_class(asked)
    if scenario.refuse:
        return Script((), "close", expected, 0)
    if scenario.head == "never":
        return Script((), "hang", expected, 0)
    if scenario.http != 200 or scenario.json_body:
        return Script(_split((Write(_whole(scenario, asked, model)),), split), "keep", expected, 0)
    body = _framed(scenario, _bundled(_parts(scenario, asked, Events(asked, model), after), scenario.bundle))
    writes = _split((*_with_head(scenario, body),), split)
    return Script(writes, _end(scenario), expected, sum(count for write in writes for _, count in write.marks))


def _end(scenario: Scenario) -> Literal["keep", "close", "reset", "hang"]:
    if scenario.head == "hang_after" or scenario.stop == "hang":
        return "hang"
    if scenario.stop == "reset":
        return "reset"
    return "close" if scenario.close or scenario.stop in {"cut", "cut_mid"} else "keep"


def _parts(scenario: Scenario, asked: Asked, events: Events, after: int) -> Iterator[_Part]:
    """Yield the events in their order; pings and line ends included."""
    if scenario.head == "hang_after":
        return
    for part in _events(scenario, asked, events, after):
        data = part.data.replace(b"\n", scenario.line_end)
        if scenario.pings and part.data != DONE:
            yield _Part(b": ping" + 2 * scenario.line_end, part.wait)
            part = replace(part, wait=0)  # noqa: PLW2901
        yield replace(part, data=data)


def _events(scenario: Scenario, asked: Asked, events: Events, after: int) -> Iterator[_Part]:
    total = {"asked": asked.tokens, "short": asked.tokens - 1, "zero": 0}[scenario.length]
    made = min(after, total) if scenario.stop else total
    wait = FIRST
    if asked.chat and scenario.role:
        yield _Part(events.role(), wait)
        wait = 0
    for start in range(0, made, asked.per_chunk):
        count = min(asked.per_chunk, made - start)
        finish = start + count == total and scenario.finish == "with"
        text, key = _text(scenario, start), scenario.thought if 2 * start < total and scenario.thought else "content"
        yield _Part(events.token(count, text, key=key, finish=finish), wait if start == 0 else count, count)
    if scenario.stop:
        yield from _stopped(scenario, asked, events)
        return
    if scenario.finish == "alone" or total == 0:
        yield _Part(events.token(0, "", finish=True), FIRST if total == 0 and wait == FIRST else 0)
    if asked.usage:
        yield _Part(events.usage(total + 1 if scenario.usage == "wrong" else None))
    yield _Part(DONE)


def _text(scenario: Scenario, start: int) -> str | None:
    if scenario.text == "halves":  # a character that takes two tokens
        return "日" if start % 2 else ""
    if scenario.text == "multibyte":
        return "né日🙂"
    return "" if scenario.text == "empty" or (scenario.text == "first_empty" and start == 0) else None


def _stopped(scenario: Scenario, asked: Asked, events: Events) -> Iterator[_Part]:
    wait = 1 if events.made or (asked.chat and scenario.role) else FIRST
    if scenario.stop in {"error", "event_error"}:
        yield _Part((b"event: error\n" if scenario.stop == "event_error" else b"") + STREAM_ERROR, wait)
        yield _Part(DONE)
    elif scenario.stop == "cut_mid":
        whole = events.token(1)
        yield _Part(whole[: len(whole) // 2], wait)
    elif scenario.stop in {"cut", "reset"}:
        yield _Part(b": \n\n", wait)  # something to carry the wait before the end


def _bundled(parts: Iterator[_Part], size: int) -> Iterator[tuple[_Part, ...]]:
    """Yield the parts of each write. The last ones, which follow at once, share one: nobody waits for them."""
    group: list[_Part] = []
    for part in parts:
        follows = part.tokens == 0 and part.wait == 0 and group and group[-1].tokens == 0
        if group and len(group) >= size and not follows:
            yield tuple(group)
            group = []
        group.append(part)
    if group:
        yield tuple(group)


def _framed(scenario: Scenario, groups: Iterator[tuple[_Part, ...]]) -> list[Write]:
    writes = []
    for group in groups:
        pieces = [_chunk(scenario, part.data) for part in group]
        tail = 0 if scenario.framing == "until_close" else 2  # an event is whole before its chunk's CRLF
        ends = [end - tail for end in accumulate(len(piece) for piece in pieces)]
        marks = tuple((end, part.tokens) for end, part in zip(ends, group, strict=True) if part.tokens)
        waits = [part.wait for part in group]
        writes.append(Write(b"".join(pieces), FIRST if FIRST in waits else sum(waits), 0, marks))
    ends_well = scenario.stop in {"", "error", "event_error", "no_done"} and scenario.head != "hang_after"
    if ends_well and scenario.framing != "until_close":
        last = b"0\r\nx-trailer: 1\r\n\r\n" if scenario.framing == "trailer" else b"0\r\n\r\n"
        if scenario.stop == "no_done" or not writes:
            writes.append(Write(last))
        else:
            writes[-1] = replace(writes[-1], data=writes[-1].data + last)
    return writes


def _chunk(scenario: Scenario, data: bytes) -> bytes:
    if scenario.framing == "until_close":
        return data
    if scenario.framing == "tiny":
        return b"".join(_chunk(Scenario(), data[i : i + 7]) for i in range(0, len(data), 7))
    size = f"{len(data):05X};name=value" if scenario.framing == "odd" else f"{len(data):x}"
    return size.encode() + b"\r\n" + data + b"\r\n"


def _with_head(scenario: Scenario, body: list[Write]) -> list[Write]:
    lines = ["HTTP/1.1 200 OK", "server: uvicorn", "content-type: text/event-stream; charset=utf-8"]
    if scenario.close:
        lines.append("connection: close")
    if scenario.framing != "until_close":
        lines.append("transfer-encoding: chunked")
    head = "\r\n".join([*lines, "", ""]).encode()
    if scenario.head == "with_first" and body:
        marks = tuple((end + len(head), count) for end, count in body[0].marks)
        return [replace(body[0], data=head + body[0].data, marks=marks), *body[1:]]
    return [Write(head, 0, _LATE_HEAD_NS if scenario.head == "late" else 0), *body]


def _whole(scenario: Scenario, asked: Asked, model: str) -> bytes:
    """Return an answer that is no stream: an error, or a completion in one piece."""
    if scenario.http == 200:
        made = asked.tokens
        body = (
            f'{{"id":"cmpl-1","object":"text_completion","model":"{model}","choices":[{{"index":0,"text":" w"}}],'
            f'"usage":{{"prompt_tokens":{asked.prompt_tokens},"completion_tokens":{made}}}}}'
        ).encode()
    else:
        body = error_body(*_ERRORS[scenario.http], scenario.http)
    return answer(scenario.http, body, _REASONS.get(scenario.http, "OK"))


def answer(code: int, body: bytes, reason: str = "OK", kind: str = "application/json") -> bytes:
    """Return a response with its head."""
    head = f"HTTP/1.1 {code} {reason}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _split(writes: tuple[Write, ...], offset: int) -> tuple[Write, ...]:
    """Cut the write that holds the offset in two, which a pause keeps apart; 0 or an offset at an edge cuts nothing."""
    done: list[Write] = []
    before = 0
    for write in writes:
        cut = offset - before
        before += len(write.data)
        if not 0 < cut < len(write.data):
            done.append(write)
            continue
        early = tuple((end, count) for end, count in write.marks if end <= cut)
        late = tuple((end - cut, count) for end, count in write.marks if end > cut)
        done += [
            replace(write, data=write.data[:cut], marks=early),
            Write(write.data[cut:], 0, _PAUSE_NS, late),
        ]
    return tuple(done)
