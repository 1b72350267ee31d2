"""Server-sent events: from the bytes of a stream to the tokens that it carried, each with the time of its arrival."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

# A read of an answer: when its last byte arrived, how many bytes of the body there were then, and how long they had
# waited to be read (None where the kernel did not tell when they came).
Mark: TypeAlias = tuple[int, int, int | None]
_SOON_NS = 1_000_000


def events(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the data of each event, and where it ends in the body; an event that was cut off ends with the body.

    Lines end by LF or CRLF; comments and other fields are passed over.
    """
    data: list[bytes] = []
    at = 0
    while (end := body.find(b"\n", at)) >= 0:
        line = body[at:end]
        at = end + 1
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif data and (not line or line == b"\r"):
            yield at, _joined(data)
            data = []
    if body.startswith(b"data:", at):
        data.append(body[at + 5 :])
    if data:
        yield len(body), _joined(data)


def _joined(data: list[bytes]) -> bytes:
    return data[0].strip() if len(data) == 1 else b"\n".join(line.strip() for line in data)


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
    reasoned: bool = False
    answer_ns: int | None = None  # first content that is not reasoning
    late_events: int = 0  # events with tokens of which it is only known that they came no later than noted
    ids: list[int] = field(default_factory=list)  # of the answer; only where asked to keep it
    text: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)


def read_stream(body: bytes, marks: Sequence[Mark], *, vllm: bool, keep: bool = False) -> Stream:
    """Decode a body; marks: of its reads. An event arrives with its last byte.

    How many tokens an event carried is said, in this order, by its token ids, by the growth of its usage, or by there
    being any content at all. In the last case the usage at the end has the total, and the events only say when.
    keep: also collect the answer, for the next turn of a conversation.
    """
    stream = Stream()
    last, previous = len(marks) - 1, -1
    mark = 0
    for end, data in events(body):
        while mark < last and marks[mark][1] < end:
            mark += 1
        before = len(stream.chunks)
        _take(stream, marks[mark][0] if marks else 0, data, vllm=vllm, keep=keep)
        if len(stream.chunks) > before:
            stream.late_events += mark == previous and _was_late(marks, mark)
            previous = mark
    if stream.counts == "approx" and stream.completion_tokens is not None:
        stream.counts = "usage"
        stream.chunks = _scaled(stream.chunks, stream.completion_tokens)
    return stream


def _was_late(marks: Sequence[Mark], number: int) -> bool:
    """Tell whether events that were read together may have come one after the other, and the client too late for it.

    A server that falls behind writes several events at once; then they are read soon after the last of them came. A
    client that falls behind finds them long after. The limit is a fifth of the time between two events.
    """
    at, _, waited_ns = marks[number]
    gap_ns = (at - marks[number - 1][0]) / 2 if number else 0
    return waited_ns is None or waited_ns > max(_SOON_NS, gap_ns / 5)


def _take(stream: Stream, at: int, event: bytes, *, vllm: bool, keep: bool) -> None:
    if event == b"[DONE]":
        stream.done = True
        return
    document = _parsed(event)
    if not isinstance(document, dict):  # cut off in the middle; that [DONE] is missing says so
        return
    if document.get("error") is not None:
        stream.error = error_words(document)
        return
    made_before = stream.completion_tokens
    usage = document.get("usage")
    if isinstance(usage, dict):
        stream.prompt_tokens = _whole(usage.get("prompt_tokens"))
        stream.completion_tokens = _whole(usage.get("completion_tokens"))
    choices = document.get("choices") or ()
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, dict) for choice in choices):
        stream.error = "an event's choices are not of OpenAI's form"
        return
    # A usage that comes with every event tells by its growth what the event brought; one at the end alone does not.
    grown = None
    if usage and stream.completion_tokens is not None and (made_before is not None or not stream.chunks):
        grown = stream.completion_tokens - (made_before or 0)
    for choice in choices:
        _take_choice(stream, at, choice, grown, vllm=vllm, keep=keep)


def _parsed(event: bytes) -> Any:
    try:
        return msgspec.json.decode(event)
    except (msgspec.DecodeError, RecursionError):
        try:
            return json.loads(event)  # takes the NaN that a Python server may write
        except (ValueError, RecursionError):
            return None


def _take_choice(stream: Stream, at: int, choice: dict[str, Any], grown: int | None, *, vllm: bool, keep: bool) -> None:
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
    if reason:
        stream.finish_reason = str(reason)
    delta = choice.get("delta")
    if isinstance(delta, dict):
        if delta.get("reasoning") or delta.get("reasoning_content"):
            stream.reasoned = True
        elif stream.answer_ns is None and (delta.get("content") or delta.get("tool_calls")):
            stream.answer_ns = at
    if keep:
        stream.ids += ids if isinstance(ids, list) else []
        stream.text += str((delta.get("content") if isinstance(delta, dict) else choice.get("text")) or "")


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
