"""What an answer can be like: the switches, each with the class that a right client puts such a request in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.refserver.events import Asked


@dataclass(frozen=True, slots=True)
class Scenario:
    """Deviations from vLLM's ordinary answer. `after` is a number of tokens that comes with the request."""

    expected: str = "ok"
    inexact: str = "ok"  # the class where the length was not demanded
    text: Literal["words", "empty", "first_empty", "halves", "multibyte"] = "words"
    thought: Literal["", "reasoning", "reasoning_content"] = ""  # the field of the first half of a chat's tokens
    role: bool = True
    finish: Literal["with", "alone", "none"] = "with"  # the last token's chunk, one of its own, no reason at all
    usage: Literal["asked", "never", "wrong", "every"] = "asked"
    ids: bool = True
    per_chunk: int = 0  # 0: the server's own
    bundle: int = 1  # events a write
    line_end: bytes = b"\n"
    pings: bool = False
    length: Literal["asked", "short", "zero"] = "asked"
    # After some tokens; "error" and "event_error" are in-band, and then comes [DONE].
    stop: Literal["", "error", "event_error", "cut", "cut_mid", "reset", "no_done", "hang"] = ""
    head: Literal["at_once", "late", "with_first", "never", "hang_after"] = "at_once"
    framing: Literal["chunked", "tiny", "odd", "trailer", "until_close"] = "chunked"
    close: bool = False  # says `connection: close`
    refuse: bool = False  # closes without a word
    http: int = 200
    json_body: bool = False

    def right_class(self, asked: Asked) -> str:
        """Return the status that a request must end with."""
        if self.expected == "length_mismatch" and not asked.exact:
            return self.inexact
        return self.expected


SCENARIOS: dict[str, Scenario] = {
    "normal": Scenario(),
    "no_role": Scenario(role=False),
    "empty_first": Scenario(text="first_empty"),
    "empty_text": Scenario(text="empty"),
    "reasoning": Scenario(thought="reasoning"),
    "reasoning_content": Scenario(thought="reasoning_content"),
    "utf8_halves": Scenario(text="halves"),
    "multibyte": Scenario(text="multibyte"),
    "bundled": Scenario(bundle=3),
    "crlf": Scenario(line_end=b"\r\n"),
    "pings": Scenario(pings=True),
    "finish_alone": Scenario(finish="alone"),
    "no_usage": Scenario(usage="never"),
    "continuous_usage": Scenario(usage="every"),
    "no_ids": Scenario(ids=False),
    "no_ids_empty_text": Scenario(ids=False, text="empty"),
    "no_ids_continuous": Scenario(ids=False, usage="every", per_chunk=2),
    "four_a_chunk": Scenario(per_chunk=4),
    "tiny_chunks": Scenario(framing="tiny"),
    "odd_chunks": Scenario(framing="odd"),
    "trailer": Scenario(framing="trailer"),
    "until_close": Scenario(framing="until_close", close=True),
    "connection_close": Scenario(close=True),
    "late_head": Scenario(head="late"),
    "head_with_first": Scenario(head="with_first"),
    "inband_error": Scenario("inband_error", stop="error"),
    "event_error": Scenario("inband_error", stop="event_error"),
    "cut": Scenario("truncated", stop="cut"),
    "cut_mid_event": Scenario("truncated", stop="cut_mid"),
    "reset": Scenario("truncated", stop="reset"),
    "no_done": Scenario("truncated", stop="no_done"),
    "json_body": Scenario("truncated", json_body=True),
    "short": Scenario("length_mismatch", length="short"),
    "wrong_usage": Scenario("length_mismatch", "length_mismatch", usage="wrong"),
    "zero": Scenario("empty", length="zero"),
    "refuse": Scenario("connect", refuse=True),
    "http_400": Scenario("http_400", http=400),
    "http_429": Scenario("http_429", http=429),
    "http_500": Scenario("http_500", http=500),
    "http_503": Scenario("http_503", http=503),
    "hang": Scenario("timeout_ttft", head="never"),
    "hang_after_head": Scenario("timeout_ttft", head="hang_after"),
    "hang_mid": Scenario("timeout_stall", stop="hang"),
}
