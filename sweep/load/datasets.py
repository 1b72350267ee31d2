"""Recorded prompts and traces: files read row by row, with errors that name the file, the row and the fix."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from sweep.errors import ConfigError
from sweep.load.shapes import unsendable
from sweep.text import printable, shortened

Content: TypeAlias = str | list[int] | list[dict[str, Any]]

BLOCK_TOKENS = 512  # that one hash id of a Mooncake trace stands for
CHARS_PER_TOKEN = 4  # of English text in the usual vocabularies; only estimates rest on it

_CHUNK_BYTES = 1 << 20
_MAX_ENTRY_CHARS = 1 << 26
_USER = frozenset({"human", "user"})
_ASSISTANT = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})
_BLANKS = re.compile(r"[ \t\r\n]*")
_LENGTH_FIELDS = ("output_tokens", "max_tokens", "output_length")


@dataclass(frozen=True, slots=True)
class Turn:
    """content: None where it is to be made up. tokens: of the content, an estimate unless it is exact.

    answer_tokens: of the answer, as the row says or as its recorded answer suggests; None where it has neither.
    """

    content: Content | None
    tokens: int
    exact: bool
    answer_tokens: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation or request of a file.

    blocks: of a trace, the hash ids of its blocks of 512 tokens. history_tokens: in leading blocks of earlier rows.
    place: in the file, behind its path: ":3" for a line, or ", entry 3".
    """

    turns: tuple[Turn, ...]
    at_s: float | None = None
    blocks: tuple[int, ...] = ()
    history_tokens: int = 0
    place: str = ""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The rows of a file. skipped: conversations that could not be used. sha256: of the file's bytes."""

    path: str
    rows: tuple[Row, ...]
    sha256: str
    skipped: int = 0

    @property
    def mean_turns(self) -> float:
        return sum(len(row.turns) for row in self.rows) / len(self.rows)


class _RowError(Exception):
    """What is wrong with a row, and what to do."""


def read_prompts(path: str, file_format: str, *, turns: int, needs_answers: bool) -> Dataset:
    """Read recorded prompts: ShareGPT conversations, or rows with `prompt` or `messages`.

    turns: how many of a conversation are used at most. needs_answers: the rows have to tell the lengths of answers; a
    conversation is cut where it does not. Raises ConfigError.
    """

    def parse(entry: dict[str, Any]) -> Row | None:
        if "conversations" in entry or "conversation" in entry:
            return _conversation(entry, turns, needs_answers=needs_answers)
        if file_format == "sharegpt":
            raise _RowError(f"has no `conversations`{_keys(entry)}; leave load.prompt.format out for other rows")
        if turns > 1:
            raise _RowError("is a single request; turns wants a file of ShareGPT conversations")
        return _request(entry, needs_answer=needs_answers)

    rows, digest, skipped = _read(path, file_format, parse)
    return Dataset(path, tuple(rows), digest, skipped)


def read_trace(path: str) -> Dataset:
    """Read requests with the times at which they came, in the order of these: Mooncake's format, or prompts with times.

    Raises ConfigError.
    """
    rows, digest, _ = _read(path, "jsonl", _traced)
    rows.sort(key=lambda row: row.at_s or 0.0)
    first_s = rows[0].at_s or 0.0
    seen: set[int] = set()
    placed = []
    for row in rows:
        known = next((i for i, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        seen.update(row.blocks)
        # The last token of a prompt is always computed, so it never comes from a cache.
        history = min(known * BLOCK_TOKENS, row.turns[0].tokens - 1)
        placed.append(replace(row, at_s=(row.at_s or 0.0) - first_s, history_tokens=history))
    return Dataset(path, tuple(placed), digest)


def _read(path: str, file_format: str, parse: Callable[[dict[str, Any]], Row | None]) -> tuple[list[Row], str, int]:
    rows: list[Row] = []
    skipped = 0
    digest = hashlib.sha256()
    for place, entry in _entries(path, file_format, _chunks(path, digest.update)):
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}{place}: is no JSON object")
        try:
            row = parse(entry)
        except _RowError as error:
            raise ConfigError(f"{path}{place}: {error}") from None
        if row is None:
            skipped += 1
        else:
            rows.append(replace(row, place=place))
    if not rows:
        why = f"none of its {skipped} conversations begins with the user and has what is needed" if skipped else "empty"
        raise ConfigError(f"{path}: no prompts: {why}")
    return rows, digest.hexdigest(), skipped


def _chunks(path: str, see: Callable[[bytes], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ConfigError(f"{path}: not a file")
        with Path(path).open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                see(data)
                yield decoder.decode(data)
        yield decoder.decode(b"", final=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a relative path starts from the search space's folder") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in it, or half of a character
        raise ConfigError(f"{path}: no name that a file can have") from None


def _entries(path: str, file_format: str, chunks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place in the file: the entries of a JSON array, or a JSON object for each line."""
    text = ""
    blank_lines = 0
    while not text and (chunk := next(chunks, None)) is not None:
        text = chunk.lstrip()
        blank_lines += chunk.count("\n", 0, len(chunk) - len(text))
    if not text:
        raise ConfigError(f"{path}: the file is empty")
    if text[0] not in "[{":
        raise ConfigError(f"{path}: neither a JSON array nor a JSON object for each line")
    if text[0] == "{":
        for number, line in enumerate(_lines(chain([text], chunks)), blank_lines + 1):
            if line.strip():
                try:
                    yield f":{number}", json.loads(line)
                except (ValueError, RecursionError):
                    raise ConfigError(f"{path}:{number}: not JSON; each line must hold one object") from None
    elif file_format == "jsonl":
        raise ConfigError(f"{path}: a JSON array, where each line should hold one object; `jq -c '.[]'` makes it so")
    else:
        yield from _array(path, text[1:], chunks)


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    pending: list[str] = []  # joined once, since a line may be as long as many chunks
    for chunk in chunks:
        *whole, rest = chunk.split("\n")
        for line in whole:
            yield "".join([*pending, line])
            pending.clear()
        pending.append(rest)
    yield "".join(pending)


def _array(path: str, text: str, chunks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Decode one entry after the other, so that a file of gigabytes is never in memory as a whole."""
    decoder = json.JSONDecoder()
    number, position, due = 1, 0, True  # due: an entry may come here, and no comma
    while True:
        blanks = _BLANKS.match(text, position)
        position = blanks.end() if blanks else position
        mark = text[position : position + 1]
        if mark == "]" and not (due and number > 1):
            break
        if mark == "," and not due:
            position, due = position + 1, True
            continue
        if mark and (not due or mark in ",]"):
            raise ConfigError(f"{path}, entry {number}: not JSON: a comma too few before it, or one too many")
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            rest = text[position:]
            more = _more(chunks, len(rest))
            if not more or len(rest) > _MAX_ENTRY_CHARS:
                raise ConfigError(f"{path}, entry {number}: not JSON, or cut off") from None
            text, position = rest + more, 0
            continue
        yield f", entry {number}", entry
        number, due = number + 1, False
    if text[position + 1 :].strip() or any(chunk.strip() for chunk in chunks):
        raise ConfigError(f"{path}: something follows the JSON array")


def _more(chunks: Iterator[str], held: int) -> str:
    """Return as much as is held already, and a little more: what is long is then decoded again a few times only."""
    parts: list[str] = []
    while sum(map(len, parts)) <= held and (chunk := next(chunks, None)) is not None:
        parts.append(chunk)
    return "".join(parts)


def _conversation(entry: dict[str, Any], most: int, *, needs_answers: bool) -> Row | None:
    """Return the user's turns in order, or None where the user does not begin. System messages are left out."""
    messages = entry.get("conversations", entry.get("conversation"))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _RowError("`conversations` is no list of messages")
    said = [(_role(message), _value(message)) for message in messages]
    said = [(role, value) for role, value in said if role != "system"]
    turns: list[Turn] = []
    for index, (role, value) in enumerate(said):
        if role == "user":
            answer = said[index + 1] if index + 1 < len(said) else ("", "")
            tokens = estimate(answer[1]) if answer[0] == "assistant" and answer[1] else None
            if len(turns) == most or not value.strip() or (needs_answers and tokens is None):
                break
            turns.append(Turn(value, estimate(value), exact=False, answer_tokens=tokens))
        elif not turns:
            break
    return Row(tuple(turns)) if turns else None


def _role(message: dict[str, Any]) -> str:
    role = message.get("from", message.get("role"))
    if not isinstance(role, str):
        raise _RowError("a message of it has no `from`")
    return "user" if role in _USER else "assistant" if role in _ASSISTANT else role


def _value(message: dict[str, Any]) -> str:
    value = message.get("value", message.get("content"))
    if not isinstance(value, str):
        raise _RowError("a message of it has no text in `value`")
    return _sound(value)


def _request(entry: dict[str, Any], *, needs_answer: bool) -> Row:
    if ("prompt" in entry) == ("messages" in entry):
        raise _RowError(f"wants `prompt` or `messages`{_keys(entry)}")
    answer = _own_length(entry)
    if "prompt" in entry:
        content: Content = _prompt(entry["prompt"])
    else:
        content, recorded = _messages(entry["messages"])
        answer = answer or recorded
    if needs_answer and answer is None:
        raise _RowError("says nothing of its answer's length; give `output_tokens`, or load.output for all rows")
    exact = isinstance(content, list) and isinstance(content[0], int)
    tokens = len(content) if exact else _estimate_of(content)
    return Row((Turn(content, tokens, exact, answer),))


def _own_length(entry: dict[str, Any]) -> int | None:
    for name in _LENGTH_FIELDS:
        if entry.get(name) is not None:
            return _whole(entry, name, 1)
    return None


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return _sound(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        return prompt
    raise _RowError("`prompt` is neither text nor a list of token ids (0 to 2^31 - 1), or it is empty")


def _messages(messages: Any) -> tuple[list[dict[str, Any]], int | None]:
    """Return the messages up to the recorded answer, and an estimate of its tokens."""
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise _RowError("`messages` is no list of messages with `role` and `content`, text or a list of parts")
    if problem := unsendable(messages):
        raise _RowError(f"has {problem}")
    answer = None
    if messages and messages[-1]["role"] == "assistant":
        *messages, last = messages
        answer = _estimate_of([last])
    if not any(message["role"] == "user" for message in messages):
        raise _RowError("`messages` has none of the user")
    return messages, answer


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str)


def _traced(entry: dict[str, Any]) -> Row:
    at_ms = entry.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1 << 63:
        raise _RowError(f"wants `timestamp`, in milliseconds, not negative and below 2^63{_keys(entry)}")
    if "input_length" not in entry:
        return replace(_request(entry, needs_answer=True), at_s=at_ms / 1000)
    tokens, answer = _whole(entry, "input_length", 1), _whole(entry, "output_length", 1)
    blocks = entry.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < 1 << 63 for block in blocks):
        raise _RowError("`hash_ids` is no list of numbers")
    if len(blocks) > math.ceil(tokens / BLOCK_TOKENS):
        raise _RowError(f"has more `hash_ids` than blocks of {BLOCK_TOKENS} in its `input_length`")
    return Row((Turn(None, tokens, exact=True, answer_tokens=answer),), at_ms / 1000, tuple(blocks))


def _whole(entry: dict[str, Any], name: str, least: int) -> int:
    value = entry.get(name)
    if type(value) is not int or not least <= value < 1 << 31:
        raise _RowError(f"`{name}` must be a whole number of at least {least}")
    return value


def _sound(text: str) -> str:
    if problem := unsendable(text):
        raise _RowError(f"has {problem}")
    return text


def _keys(entry: dict[str, Any]) -> str:
    return f" (it has {shortened(printable(', '.join(map(str, entry))), 40)})"


def estimate(text: str) -> int:
    """Return about how many tokens a text has."""
    return max(1, round(len(text) / CHARS_PER_TOKEN))


def _estimate_of(content: Iterable[Any]) -> int:
    if isinstance(content, str):
        return estimate(content)
    return sum(estimate(str(message.get("content", ""))) for message in content)
