"""What requests look like: their prompts, their answers, their conversations, and the classes of a mix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from sweep.load.lengths import MAX_TOKENS, Length, longest, shortest, words
from sweep.section import Section
from sweep.slo import Limits

_CLASS_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# Fields of a request's body by which the client plans and measures; each with where else that is said.
_OWNED: Mapping[str, str] = {
    "model": "serve.model, or load.adapters",
    "prompt": "load.prompt",
    "messages": "load.prompt",
    "prompt_embeds": "load.prompt",
    "truncate_prompt_tokens": "load.prompt.tokens",
    "max_tokens": "load.output.tokens",
    "max_completion_tokens": "load.output.tokens",
    "min_tokens": "load.output.natural",
    "ignore_eos": "load.output.natural",
    **dict.fromkeys(("stream", "stream_options", "n", "best_of", "echo", "use_beam_search"), ""),
    **dict.fromkeys(("cache_salt", "return_token_ids", "request_id", "stream_interval"), ""),
}
_CHAT_ONLY = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
# With these an answer ends where it ends, so its length cannot be held.
_ENDS_ANSWERS = frozenset(
    {"repetition_detection", "response_format", "stop", "stop_token_ids", "structured_outputs", "tools"}
)


def unsendable(value: Any) -> str | None:
    """Say what a value has that the body of a request, JSON in UTF-8, cannot hold; None where it can be sent."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "half of a character (a lone surrogate), which no server takes"
    except ValueError:
        return "a number that JSON does not know (NaN or infinity)"
    except TypeError:
        return "a value for which JSON has no form"
    except RecursionError:
        return "too many levels within each other"
    return None


def _is_free(fields: dict[str, Any]) -> dict[str, Any]:
    for name, value in fields.items():
        if problem := unsendable(value):
            raise ValueError(f"{name} has {problem}")
        if name in _OWNED:
            place = f"; it is set by {_OWNED[name]}" if _OWNED[name] else ""
            raise ValueError(f"{name} belongs to the load client, which plans and measures by it{place}")
    return fields


BodyFields: TypeAlias = Annotated[dict[str, Any], AfterValidator(_is_free)]


class PromptShape(Section):
    """Random tokens of a length, or the prompts of a file.

    tokens: the whole length; `shared_prefix` is the part of it that all prompts of a group begin with.
    """

    tokens: Length | None = None
    shared_prefix: int = Field(default=0, ge=0, strict=True)
    groups: int = Field(default=1, ge=1, le=MAX_TOKENS, strict=True)
    file: str | None = None
    format: Literal["auto", "sharegpt", "jsonl"] = "auto"

    @model_validator(mode="after")
    def _is_one_source(self) -> Self:
        if (self.tokens is None) == (self.file is None):
            raise ValueError("give either tokens (random ones, of that number) or file (recorded prompts)")
        if self.file is not None and self.shared_prefix:
            raise ValueError("shared_prefix goes with tokens; the prompts of a file share what they share")
        if self.file is None and self.format != "auto":
            raise ValueError("format goes with file")
        if self.groups > 1 and not self.shared_prefix:
            raise ValueError(f"groups {self.groups} differ by their shared prefix; give shared_prefix as well")
        return self

    @model_validator(mode="after")
    def _leaves_a_tail(self) -> Self:
        if self.tokens is None:
            return self
        least = self.tokens if isinstance(self.tokens, int) else self.tokens.longest
        if self.shared_prefix >= least:
            raise ValueError(
                f"shared_prefix {self.shared_prefix} leaves {least - self.shared_prefix} of {least} tokens"
                f" that differ between prompts; it can be at most {least - 1}"
            )
        if self.shared_prefix >= shortest(self.tokens) > 1:
            raise ValueError(
                f"shared_prefix {self.shared_prefix} is longer than the shortest prompt, min {shortest(self.tokens)};"
                f" leave min out, or set it to {self.shared_prefix + 1} or more"
            )
        return self

    @property
    def words(self) -> str:
        if self.tokens is None:
            return "prompts of a file"
        shared = f" ({self.shared_prefix:,} shared)" if self.shared_prefix else ""
        return f"prompts of {words(self.tokens)}{shared}"


class OutputShape(Section):
    """Length in tokens; every answer is made exactly this long where the server allows it, unless it is natural."""

    tokens: Length | None = None
    natural: bool = False

    @property
    def words(self) -> str:
        if self.tokens is None:
            return "answers as long as the file's"
        return f"answers of {'at most ' if self.natural else ''}{words(self.tokens)}"


class MixClass(Section):
    """One class of a mix. What it leaves out is as in `load`; `request` is laid over that of `load`."""

    name: str
    share: float = Field(gt=0, le=1_000_000)
    prompt: PromptShape | None = None
    output: OutputShape | None = None
    turns: int | None = Field(default=None, ge=1, le=256, strict=True)
    think_s: float | None = Field(default=None, ge=0, le=86_400)
    request: BodyFields = Field(default_factory=dict)
    adapters: tuple[str, ...] | None = None
    slo: Limits = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not _CLASS_NAME.fullmatch(name):
            raise ValueError(f"{name[:40]!r} will name columns: small letters, digits, '_' and '-', 32 at most")
        return name


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of a mix with what it inherits, or the whole load where there is no mix.

    share: of the conversations; those of all classes add up to 1. prompt: None in a trace. output: None where the file
    says. groups_from: the number of its first prefix group; each class has groups of its own.
    """

    name: str | None
    share: float
    prompt: PromptShape | None
    output: OutputShape | None
    turns: int
    think_s: float
    request: Mapping[str, Any]
    adapters: tuple[str, ...]
    groups_from: int = 0

    @property
    def longest_tokens(self) -> int | None:
        """The longest prompt, with the answers before it as history, and its answer; None where a file decides.

        Natural answers may be short, so none is sure to be history.
        """
        if self.prompt is None or self.prompt.tokens is None or self.output is None or self.output.tokens is None:
            return None
        answer = longest(self.output.tokens)
        held = 0 if self.output.natural else answer
        shared = self.prompt.shared_prefix  # comes once
        new = longest(self.prompt.tokens) - shared
        return shared + self.turns * new + (self.turns - 1) * held + answer

    @property
    def words(self) -> str:
        parts = [self.prompt.words] if self.prompt else []
        parts.append(self.output.words if self.output else "answers as long as the file's")
        if self.turns > 1:
            parts.append(f"{self.turns} turns")
        return ", ".join(parts)

    def problems(self, endpoint: str) -> list[str]:
        """Say what does not fit together once everything is inherited."""
        name = f"mix: {self.name}: " if self.name else ""
        problems = []
        if self.prompt is None:
            problems.append("prompt is missing")
        elif self.prompt.file is None and (self.output is None or self.output.tokens is None):
            problems.append("output.tokens is missing; only the prompts of a file bring a length of their answers")
        if self.think_s and self.turns == 1:
            problems.append("think_s is the pause between turns; give turns of 2 or more")
        natural = self.output is not None and self.output.natural
        problems += field_problems(self.request, endpoint, natural=natural)
        return [f"{name}{problem}" for problem in problems]


def field_problems(fields: Mapping[str, Any], endpoint: str, *, natural: bool) -> list[str]:
    """Say which fields of a request's body the endpoint does not know, and which do not let an answer be held."""
    problems = []
    for field in fields:
        if field in _CHAT_ONLY and endpoint != "chat":
            problems.append(f"request.{field} is for chats; set load.endpoint: chat, or leave it out")
        elif field in _ENDS_ANSWERS and not natural:
            problems.append(
                f"request.{field} may end an answer before its length; set output.natural: true, so that it may"
            )
    return problems
