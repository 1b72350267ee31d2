"""Reading a log of any size in constant memory, and what stands before a message.

Most of a log is of no interest. It is searched in blocks, and only a block that holds a word looked for becomes lines.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

_BLOCK_BYTES = 1 << 18
_PIECE_BYTES = 4000
_END_BYTES = 1 << 16
_DIGITS = b"0123456789"
# A terminal wraps a long message, and pydantic writes two lines for a field: those that follow are needed with a line.
_AHEAD = 3

_ANSI = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")
_LEVEL = r"DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"

# A record of vLLM's own logger, wherever a log collector put it.
_RECORD = re.compile(
    rf"\b(?P<level>{_LEVEL}) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?:\[[^\]]{{1,80}}\]|[\w./]{{1,80}}:\d+\])\s?"
)
_RECORD_WITHIN = 400

# What processes, frameworks and log collectors put in front of a message, in any order and number.
_PREFIX = re.compile(
    rf"""\s*(?:
      (?P<uvicorn>{_LEVEL}):(?=\s)
    | (?P<default>{_LEVEL}):[\w.]{{1,60}}:                   # logging's default form
    | \[(?P<bracket>(?i:{_LEVEL}))\](?:\ \(\w+\)(?=\ ))?
    | std(?:out|err)\ +\|
    | [-|]\ +(?P<dashed>{_LEVEL})\ +[-|]                  # logging with dashes, loguru
    | (?:[\w.]+\.py:\d+|[\w.]+:\w+:\d+)\ +-(?=\ )           # and the place in the code behind it
    | \([^()]{{0,60}}\bpid=\d+[^()]{{0,60}}\)               # the process of vLLM that speaks
    | \[rank\d+\]:
    | >(?=\ )                                              # quoted in a mail or an issue
    | \[?(?P<letter>[IWEF])\d{{4}}\ \d\d:\d\d:\d\d\.\d+\ (?:\d+\ )?[\w./-]+:\d+\]   # torch, glog
    | \[?\d{{4}}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?\ ?(?:Z|[+-]\d\d:?\d\d)?\]?(?:\ std(?:out|err)\ [FP](?=\ ))?
    | \w{{3}}\ [\ \d]\d\ \d\d:\d\d:\d\d\ [\w.-]{{1,64}}\ [\w.@/-]{{1,64}}(?:\[\d+\])?:  # syslog, journald
    | [\w.-]{{1,64}}\ [\w.@/-]{{1,64}}\[\d+\]:               # and after a time of another form
    | \[[\w.-]*(?:pod|container)[\w./-]*\]                  # kubectl logs --prefix
    | [\w.-]{{1,60}}-\d+\ +\|                               # docker compose
    )\s?""",
    re.VERBOSE,
)
_MAX_PREFIXES = 8
_CODE_INDENT = " " * 4
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
# The keys under which collectors keep the message when they write JSON, and those of Python's loggers beside it.
_JSON_MESSAGE = ("log", "message", "msg", "MESSAGE", "textPayload", "line")
_JSON_TRACEBACK = ("exc_info", "exc_text")
_JSON_BEGINS = re.compile(r"\s*\{\s*\"")
# What users asked and were answered tells nothing of the server, whatever words stand in it.
_PROMPT = re.compile(
    rb"[\]\"|] ?(?:Received request|Generated response|Request) [\w.-]{1,200}(?: \([^)]{0,40}\))?:? "
    rb"(?:prompt|output|details)\b"
)


class Line(NamedTuple):
    """A line of the log without its prefixes. level: of the record that it begins, None for the lines after it.

    indented: as far as the code that a traceback quotes.
    """

    level: str | None
    text: str
    indented: bool = False


class Found(NamedTuple):
    """A line that holds words looked for. number: from 1. ahead: the raw lines after it. before: the raw one before.

    head: the beginning of the record of which this is a later piece; its level counts.
    """

    number: int
    words: list[bytes]
    raw: bytes
    ahead: list[bytes]
    before: bytes
    head: bytes = b""

    @property
    def line(self) -> Line:
        line = strip(self.raw.decode(errors="replace"))
        return line._replace(level=strip(self.head.decode(errors="replace")).level) if self.head else line

    @property
    def wrapped(self) -> str:
        """The line and those after it as one text: a terminal may have wrapped the message in the middle of a word."""
        return self.line.text + "".join(strip(raw.decode(errors="replace")).text for raw in self.ahead)


def strip(line: str) -> Line:
    """Take the prefixes off a line."""
    if _JSON_BEGINS.match(line):
        line = _of_json(line) or line
    if "\x1b" in line or "\x9b" in line:
        line = _ANSI.sub("", line)
    level = None
    at = 0
    if record := _RECORD.search(line, 0, _RECORD_WITHIN):
        level, at = record["level"], record.end()
    for _ in range(_MAX_PREFIXES):
        match = _PREFIX.match(line, at)
        if match is None:
            break
        tag = (match["bracket"] or match["dashed"] or match["default"] or "").upper()
        # A collector calls everything INFO that comes out of a process.
        tag = "" if tag in {"INFO", "DEBUG"} else tag
        level = match["uvicorn"] or tag or _LETTERS.get(match["letter"] or "") or level
        at = match.end()
    level = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(level or "", level)
    return Line(level, line[at:].strip(), line.startswith(_CODE_INDENT, at))


def _of_json(line: str) -> str | None:
    """Return the message of a record in JSON, its level before it and its traceback behind it; None for other JSON."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    message = next((text for key in _JSON_MESSAGE if isinstance(text := document.get(key), str)), None)
    if message is None:
        return None
    for key in _JSON_TRACEBACK:
        trace = document.get(key)
        lines = trace if isinstance(trace, list) else [trace]
        message += "".join(f"\n{text}" for text in lines if isinstance(text, str))
    # Python's own name for it is the level that the program gave; a collector calls everything INFO.
    said, told = (str(document.get(key, "")).upper() for key in ("levelname", "level"))
    told = told if "level" in document else str(document.get("severity", "")).upper()
    level = said or ("" if told in {"INFO", "DEBUG"} else told)
    return f"{level}: {message}" if re.fullmatch(_LEVEL, level) else message


def opened(log: Path | str | BinaryIO) -> Iterator[bytes]:
    """Yield the log's bytes in blocks: of a path, of a text, of an open stream. A log that cannot be read is empty."""
    if isinstance(log, str):
        data = log.removeprefix("\ufeff").encode(errors="replace")
        yield from (data[at : at + _BLOCK_BYTES] for at in range(0, len(data), _BLOCK_BYTES))
    elif isinstance(log, Path):
        with suppress(OSError), log.open("rb") as file:
            yield from _transcoded(file)
    else:
        yield from _transcoded(log)


def _transcoded(stream: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of UTF-8 without a byte order mark, also of a log that PowerShell has redirected (UTF-16)."""
    block = stream.read(_BLOCK_BYTES)
    wide = _wide(block[:_PIECE_BYTES])
    decoder = codecs.getincrementaldecoder(wide)(errors="replace") if wide else None
    for mark in (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        block = block.removeprefix(mark)
    while block:
        yield decoder.decode(block).encode(errors="replace") if decoder else block
        block = stream.read(_BLOCK_BYTES)


def _wide(start: bytes) -> str | None:
    """Return which UTF-16 this is. In most of it every other byte is zero; a mark alone proves nothing."""
    even, odd = start[::2].count(0), start[1::2].count(0)
    if start.startswith(codecs.BOM_UTF16_LE) or (even * 10 < odd and odd * 4 > len(start)):
        return "utf-16-le" if odd else None
    if start.startswith(codecs.BOM_UTF16_BE) or (odd * 10 < even and even * 4 > len(start)):
        return "utf-16-be" if even else None
    return None


class Reader:
    """Goes through a log once; yields the lines that hold a word looked for.

    loud: words that matter only in a line that is no INFO record. any_level: those that matter in every line. Both may
    be replaced between two lines; a word that is taken out is no longer found from the next block on. noise: lines with
    just these words are of no interest.
    """

    def __init__(self, blocks: Iterable[bytes], *, loud: Collection[bytes] = (), any_level: Collection[bytes]) -> None:
        self.loud = loud
        self.any_level = any_level
        self.noise = set[tuple[bytes, ...]]()
        self.last = b""  # the last line that says something
        self._lines = 0
        self._blocks = blocks

    def __iter__(self) -> Iterator[Found]:
        kept = b""
        for block in _without_middles(self._blocks):
            kept += block
            if cut := _cut(kept):
                yield from self._search(kept[:cut], kept[cut:])
                kept = kept[cut:]
        yield from self._search(kept, b"")

    def _search(self, body: bytes, rest: bytes) -> Iterator[Found]:
        begun, before = self._lines, self.last
        self._lines += body.count(b"\n")
        self.last = next((part for part in reversed(body.rsplit(b"\n", 8)) if part.strip()), before)[:_PIECE_BYTES]
        lines = body.split(b"\n")
        shapes = body.translate(None, _DIGITS).split(b"\n")
        any_level, loud = self.any_level, self.loud
        words = _Words(any_level, loud)
        by_shape, numbers = words.of(set(shapes)), words.with_digits(body)
        if not by_shape and not numbers:
            return
        following = lines + rest.split(b"\n", _AHEAD)[:_AHEAD]
        for i, (line, shape) in enumerate(zip(lines, shapes, strict=True)):
            if any_level is not self.any_level or loud is not self.loud:
                any_level, loud = self.any_level, self.loud
                if words.grow(any_level, loud):
                    by_shape, numbers = words.of(set(shapes[i:])), words.with_digits(body)
            here = by_shape.get(shape, [])
            if numbers:
                here = here + [word for word in numbers if word in line]
            pieces = _pieces(line) if here and tuple(here) not in self.noise else []
            for at, (piece, head) in enumerate(pieces):
                if found := [word for word in here if word in piece]:
                    ahead = [part for part, _ in pieces[at + 1 : at + 1 + _AHEAD]]
                    ahead += [part[:_PIECE_BYTES] for part in following[i + 1 : i + 1 + _AHEAD - len(ahead)]]
                    above = pieces[at - 1][0] if at else lines[i - 1][:_PIECE_BYTES] if i else before
                    yield Found(begun + i + 1, found, piece, ahead, above, head)


class _Words:
    """The words that a block is searched for: all that have been asked for since its beginning."""

    def __init__(self, any_level: Collection[bytes], loud: Collection[bytes]) -> None:
        self._any_level, self._all = set(any_level), set(any_level).union(loud)

    def grow(self, any_level: Collection[bytes], loud: Collection[bytes]) -> bool:
        """Search for these as well; returns whether that is more than before."""
        if self._any_level.issuperset(any_level) and self._all.issuperset(loud):
            return False
        self._any_level.update(any_level)
        self._all.update(any_level, loud)
        return True

    def of(self, shapes: Collection[bytes]) -> dict[bytes, list[bytes]]:
        """Return the lines that hold words looked for, with these; all without their digits, and so far fewer."""
        everything = b"\n".join(shapes)
        errors = b"\n".join([shape for shape in shapes if not _is_quiet(shape)])
        words = [word for word in self._any_level if word in everything]
        words += [word for word in self._all - self._any_level if word in errors]
        return {shape: found for shape in shapes if words and (found := [word for word in words if word in shape])}

    def with_digits(self, body: bytes) -> list[bytes]:
        return [word for word in self._all if _has_digits(word) and word in body]


def _has_digits(word: bytes) -> bool:
    return len(word.translate(None, _DIGITS)) < len(word)


def _is_quiet(shape: bytes) -> bool:
    """Return whether it is certainly an INFO record of vLLM or uvicorn. A log collector may call an error INFO."""
    if b"\r" in shape[:-1]:
        return all(_is_quiet(part) for part in shape.split(b"\r") if part)
    return (b"INFO - ::" in shape or b"INFO:     " in shape) and b"ERROR" not in shape


def _without_middles(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks; of a line that fills more than one of them, its two ends."""
    begun = False  # within a line whose beginning has been given
    ending = b""
    for block in blocks:
        if b"\n" not in block and b"\r" not in block:
            if not begun:
                yield block[:_END_BYTES]
                block = block[_END_BYTES:]  # noqa: PLW2901
                begun = True
            ending = (ending + block)[-_END_BYTES:]
            continue
        yield ending + block
        begun, ending = False, b""
    yield ending


def _cut(kept: bytes) -> int:
    """Return where the lines end that may be searched: so that those that may be needed with them are there as well."""
    if len(kept) < _BLOCK_BYTES:
        return 0
    at = len(kept)
    for _ in range(_AHEAD + 1):
        at = kept.rfind(b"\n", 0, at)
        if at < 0:
            return len(kept) if len(kept) > 2 * _BLOCK_BYTES else 0
    return at + 1


def _pieces(line: bytes) -> list[tuple[bytes, bytes]]:
    """Return what one line of a file holds, and for later pieces of a record how it begins.

    A progress bar is as many lines as it was drawn, a huge line is cut, and JSON may hold a message of many lines.
    """
    if _PROMPT.search(line, 0, _RECORD_WITHIN):
        return []
    if line.lstrip()[:1] == b"{" and (text := _of_json(line.decode(errors="replace"))):
        first, *others = text.encode(errors="replace").split(b"\n")
        return [(first, b""), *((other, first) for other in others)]
    if len(line) <= _PIECE_BYTES and b"\r" not in line:
        return [(line, b"")]
    return [
        (part[at : at + _PIECE_BYTES], part[:_PIECE_BYTES] if at else b"")
        for part in line.split(b"\r")
        for at in range(0, len(part), _PIECE_BYTES)
    ]
