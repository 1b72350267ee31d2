"""Events of a stream, byte for byte as vLLM 0.32 writes them.

Source: vllm/entrypoints/openai/completion/serving.py and chat_completion/serving.py, `*_stream_generator`. The chunks
are dumped with exclude_unset, so a field that is set to None is there as null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# Stands where the request's number goes, and is as long.
NUMBER = b"@@@@@@@@@@@@@@@@"
_CREATED = 1_750_000_000
_FINGERPRINT = "vllm-0.32.0-tp1-ref"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, as far as it shapes the answer."""

    chat: bool
    prompt_tokens: int
    tokens: int  # how many will be made
    finish_reason: str  # length, or stop where the model ended by itself
    exact: bool  # the length was demanded: ignore_eos
    ids: bool  # return_token_ids
    usage: bool  # stream_options.include_usage
    continuous: bool  # stream_options.continuous_usage_stats
    per_chunk: int = 1


class Events:
    """Makes the events of one answer. `made` counts the tokens so far."""

    def __init__(self, asked: Asked, model: str) -> None:
        self.asked = asked
        self.made = 0
        self._model = model

    def role(self) -> bytes:
        """Return the chunk that opens a chat answer; it has no token."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([choice], prompt_token_ids=self._prompt_ids(), prompt_text=None)

    def token(self, count: int, text: str | None = None, *, key: str = "content", finish: bool = False) -> bytes:
        """Return a chunk of `count` tokens. text: None for ordinary words; key: the field of a chat's delta."""
        first = self.made == 0
        ids = [1000 + (self.made + i) % 8000 for i in range(count)]
        self.made += count
        words = "".join(f" w{number}" for number in ids) if text is None else text
        reason = self.asked.finish_reason if finish else None
        choice: dict[str, Any] = {"index": 0}
        if self.asked.chat:
            choice |= {"delta": {key: words}, "logprobs": None, "finish_reason": reason}
            if finish:
                choice["stop_reason"] = None
        else:
            choice |= {"text": words, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            choice["prompt_token_ids"] = self._prompt_ids() if first else None
        choice["token_ids"] = ids if self.asked.ids else None
        return self._event([choice])

    def usage(self, completion_tokens: int | None = None) -> bytes:
        made = self.made if completion_tokens is None else completion_tokens
        document = self._envelope([]) | {"usage": self._usage(made), "system_fingerprint": _FINGERPRINT}
        return event(document)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        document = self._envelope(choices)
        if self.asked.continuous:
            document["usage"] = self._usage(self.made)
        return event(document | more)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self.asked.chat
        return {
            "id": ("chatcmpl-" if chat else "cmpl-") + NUMBER.decode(),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": _CREATED,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self, made: int) -> dict[str, int]:
        prompt = self.asked.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def _prompt_ids(self) -> list[int] | None:
        # vLLM repeats the ids of the prompt; here only their number is right, so that an answer can be made beforehand.
        return [1000 + i % 8000 for i in range(self.asked.prompt_tokens)] if self.asked.ids else None


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_body(message: str, kind: str, code: int) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


DONE = b"data: [DONE]\n\n"
STREAM_ERROR = b"data: " + error_body("EngineCore encountered an issue.", "InternalServerError", 500) + b"\n\n"
