"""A request under way, and the record that remains of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sweep.load.plan import Ask
from sweep.load.prompts import Answer, Prompt
from sweep.load.sse import Mark, Stream, read_stream
from sweep.model import RequestRecord

_QUOTE = 12  # characters in a row that are no accident


@dataclass(slots=True, eq=False)
class Attempt:
    """What the client notes while a request runs. Decoding waits until it has ended: it would cost punctuality.

    Stamps are `perf_counter_ns`. marks: one for each read of the answer.
    status stays empty unless something went wrong that is known at once.
    """

    request_id: str
    counted: bool
    ask: Ask
    prompt: Prompt
    t_start_ns: int
    history_tokens: int = 0
    t_sched_ns: int | None = None
    t_send_ns: int | None = None
    t_headers_ns: int | None = None
    t_end_ns: int = 0
    marks: list[Mark] = field(default_factory=list)
    body: bytes = b""
    status: str = ""
    error: str | None = None

    @property
    def begun(self) -> bool:
        """Whether anything of the body has come; headers may come long before."""
        return bool(self.marks) and self.marks[-1][1] > 0


def record(
    attempt: Attempt, *, vllm: bool, keep: bool = False, secret: str | None = None
) -> tuple[RequestRecord, Answer]:
    """Decode what was received. vllm: an answer that is not to end by itself has exactly the length that was asked for.

    keep: also return the answer, else an empty one. secret: must not be in the record. The bytes are given up.
    """
    ask = attempt.ask
    exact = vllm and not ask.natural
    stream = read_stream(attempt.body, attempt.marks, vllm=vllm, keep=keep)
    status = attempt.status or _status(stream, attempt, ask.output_tokens if exact else None)
    prompt_tokens = attempt.prompt.tokens
    if not attempt.prompt.exact and stream.prompt_tokens is not None:
        prompt_tokens = stream.prompt_tokens
    found = RequestRecord(
        request_id=attempt.request_id,
        counted=attempt.counted,
        t_sched_ns=attempt.t_sched_ns,
        t_start_ns=attempt.t_start_ns,
        t_send_ns=attempt.t_send_ns,
        t_headers_ns=attempt.t_headers_ns,
        t_end_ns=attempt.t_end_ns,
        chunks=tuple(stream.chunks),
        prompt_tokens=prompt_tokens,
        prefix_group=ask.group,
        requested_tokens=ask.output_tokens,
        output_tokens=stream.tokens,
        status=status,
        finish_reason=stream.finish_reason,
        error=discreet(attempt.error or stream.error or _why(status, stream, attempt), attempt.prompt, secret),
        token_count=stream.counts,
        kind=ask.kind,
        turn=ask.turn,
        prefix_tokens=ask.prefix_tokens,
        history_tokens=attempt.history_tokens,
        answer_ns=stream.answer_ns if stream.reasoned else None,
        late_events=stream.late_events,
    )
    attempt.body, attempt.marks = b"", []
    return found, Answer(stream.ids, stream.text)


def discreet(words: str | None, prompt: Prompt, secret: str | None) -> str | None:
    """Return a server's words without the key, and up to where they quote the prompt, as complaints often do."""
    if words is None:
        return None
    words = words.replace(secret, "***") if secret else words
    if _is_ids(prompt):
        return words
    text = prompt.content if isinstance(prompt.content, str) else json.dumps(prompt.content, ensure_ascii=False)
    text = " ".join(text.split())
    length = min(_QUOTE, max(len(text), 4))
    at = next((i for i in range(len(words) - length + 1) if words[i : i + length] in text), None)
    return words if at is None else f"{words[:at].rstrip()} [...]"


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt.content, list) and not isinstance(prompt.content[0], dict)


def _status(stream: Stream, attempt: Attempt, requested: int | None) -> str:
    """Class of a stream that ended by itself; requested: its length, where that was to be exact."""
    if stream.error is not None:
        return "inband_error"
    if not stream.done:
        return "truncated"
    if not stream.chunks:
        return "empty"
    reported = stream.completion_tokens
    if reported not in {None, stream.tokens} or (requested is not None and stream.tokens != requested):
        return "length_mismatch"
    if attempt.prompt.exact and stream.prompt_tokens not in {None, attempt.prompt.tokens}:
        return "length_mismatch"  # the server took another prompt than it was sent
    return "ok"


def _why(status: str, stream: Stream, attempt: Attempt) -> str | None:
    if status == "length_mismatch":
        if attempt.prompt.exact and stream.prompt_tokens not in {None, attempt.prompt.tokens}:
            return f"a prompt of {attempt.prompt.tokens} tokens was sent, and the usage says {stream.prompt_tokens}"
        return (
            f"{attempt.ask.output_tokens} tokens were asked for, {stream.tokens} came,"
            f" and the usage says {stream.completion_tokens}"
        )
    return {"truncated": "the stream ended without [DONE]", "empty": "the stream carried no token"}.get(status)
