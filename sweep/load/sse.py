"""Server-sent events: from the bytes of a stream to the tokens that it carried, each with the time of its arrival."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal


class EventDecoder:
    """Cuts a stream into the data of its events, however the stream was cut into pieces on its way."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of all events that end in this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """Return an event that the stream's end left without its empty line."""
        return self.feed(b"\n\n")


@dataclass(slots=True)
class Stream:
    """What a stream carried. chunks: (arrived at, number of tokens), of the events with at least one token."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    done: bool = False  # [DONE] was seen
    finish_reason: str | None = None
    error: str | None = None  # an error inside a stream that began as 200
    prompt_tokens: int | None = None  # of the usage
    completion_tokens: int | None = None  # of the usage
    counts: Literal["exact", "usage", "approx"] = "approx"

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)


def read_stream(pieces: Iterable[tuple[int, bytes]], *, vllm: bool) -> Stream:
    """Decode a stream from its pieces, (arrived at, bytes). An event arrives with its last byte.

    How many tokens an event carried is said, in this order, by its token ids, by the growth of its usage, or by there
    being any content at all. In the last case the usage at the end has the total, and the events only say when.
    """
    stream = Stream()
    decoder = EventDecoder()
    at = 0
    for at, piece in pieces:
        for event in decoder.feed(piece):
            _take(stream, at, event, vllm=vllm)
    for event in decoder.close():
        _take(stream, at, event, vllm=vllm)
    if stream.counts == "approx" and stream.completion_tokens is not None:
        stream.counts = "usage"
        stream.chunks = _scaled(stream.chunks, stream.completion_tokens)
    return stream


def _take(stream: Stream, at: int, event: bytes, *, vllm: bool) -> None:
    if event.strip() == b"[DONE]":
        stream.done = True
        return
    try:
        document = json.loads(event)
    except ValueError:  # cut off in the middle; that [DONE] is missing says so
        return
    if not isinstance(document, dict):
        return
    if document.get("error") is not None:
        stream.error = error_words(document)
        return
    made_before = stream.completion_tokens
    usage = document.get("usage")
    if isinstance(usage, dict):
        stream.prompt_tokens = _whole(usage.get("prompt_tokens"))
        stream.completion_tokens = _whole(usage.get("completion_tokens"))
    choices = document.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        stream.error = "an event's choices are not of OpenAI's form"
        return
    # A usage that comes with every event tells by its growth what the event brought; one at the end alone does not.
    grown = None
    if usage and stream.completion_tokens is not None and (made_before is not None or not stream.chunks):
        grown = stream.completion_tokens - (made_before or 0)
    for choice in choices:
        _take_choice(stream, at, choice, grown, vllm=vllm)


def _take_choice(stream: Stream, at: int, choice: dict[str, Any], grown: int | None, *, vllm: bool) -> None:
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        stream.counts = "exact"
        count = len(ids)
    elif grown is not None:
        stream.counts = "exact"
        count = grown
    else:
        count = int(_carries_token(choice, vllm=vllm))
    if count > 0:
        stream.chunks.append((at, count))
    reason = choice.get("finish_reason")
    stream.finish_reason = str(reason) if reason else stream.finish_reason


def _whole(value: Any) -> int | None:
    """Return a count, or None for whatever a server put in its place."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _carries_token(choice: dict[str, Any], *, vllm: bool) -> bool:
    """Guess from the content alone. vLLM sends an event for each step, so an empty text is a part of a character."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text")) or (vllm and not choice.get("finish_reason"))
    if any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls")):
        return True
    return vllm and not delta.get("role") and not choice.get("finish_reason")


def _scaled(chunks: list[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """Spread `total` tokens over the chunks in proportion to what they were guessed to carry."""
    guessed = sum(count for _, count in chunks)
    scaled, seen, given = [], 0, 0
    for at, count in chunks:
        seen += count
        share = round(total * seen / guessed) - given
        given += share
        if share:
            scaled.append((at, share))
    return scaled


def error_words(body: Any) -> str:
    """Return what an error's body says, on one short line: of OpenAI's form, of vLLM's 401, or whatever it is."""
    error = body.get("error", body.get("message", body)) if isinstance(body, dict) else body
    words = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(words).split())[:300]
