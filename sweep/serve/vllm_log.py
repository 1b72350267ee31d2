"""Reading vLLM's log: what stands before a message, the figures of a start, how far a start has come.

Wordings are those of vLLM 0.6 to 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# What processes, frameworks and log collectors put in front of a message, in any order and number.
_PREFIX = re.compile(
    r"""\s*(?:
      (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)
        \ \d\d-\d\d\ \d\d:\d\d:\d\d(?:[.,]\d+)?\ (?:\[[^\]]{1,80}\]|[\w./]{1,80}:\d+\])
    | (?P<uvicorn>INFO|WARNING|ERROR|CRITICAL):\ {4,}     # uvicorn pads its level
    | \([^()]{0,60}\bpid=\d+[^()]{0,60}\)                 # the process of vLLM that speaks
    | \[rank\d+\]:                                        # torch
    | [\w.-]{1,60}-\d+\ +\|                               # docker compose
    | \d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?\ # kubectl logs --timestamps
    )\s?""",
    re.VERBOSE,
)
_MAX_PREFIXES = 8


class Line(NamedTuple):
    """A line of the log without its prefixes. level: of the record that it begins, None for the lines after it."""

    level: str | None
    text: str


def strip(line: str) -> Line:
    """Take the prefixes off a line."""
    line = _ANSI.sub("", line)
    level = None
    at = 0
    for _ in range(_MAX_PREFIXES):
        match = _PREFIX.match(line, at)
        if match is None:
            break
        level = match["level"] or match["uvicorn"] or level
        at = match.end()
    return Line(level, line[at:].strip())


def lines(log: str) -> Iterator[Line]:
    """Yield the lines that say something. A progress bar is as many lines as it was drawn times."""
    for line in log.splitlines():
        stripped = strip(line)
        if stripped.text:
            yield stripped


class LogFacts(NamedTuple):
    """The figures of a start. Where several engines or workers each say theirs, the first of them."""

    vllm_version: str | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None
    available_kv_bytes: int | None


# Each fact, and where it stands. The size of the cache and the concurrency stand in one line since the middle of 2026,
# with thousands separators since 0.8. The CPU backend sets its cache instead of measuring what is free.
_FACTS: dict[str, re.Pattern[str]] = {
    "vllm_version": re.compile(r"\bversion (\d+\.\d+[\w.+]*)|\(v(\d+\.\d+[\w.+]*)\) with config"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "max_concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x"),
    "max_model_len": re.compile(r"Maximum concurrency for ([\d,]+) tokens per request"),
    "available_kv_gib": re.compile(
        r"Available KV cache memory: (-?[\d.]+) GiB|(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache"
        r"|reserved ([\d.]+) GiB memory for KV Cache as specified"
    ),
}


def facts(log: str) -> LogFacts:
    """Return what the log says of the start; None for what it does not say."""
    found: dict[str, str] = {}
    for line in lines(log):
        for name, pattern in _FACTS.items():
            if name not in found and (match := pattern.search(line.text)):
                found[name] = next(group for group in match.groups() if group is not None)
    gib = _number(found.get("available_kv_gib"))
    tokens, length = _number(found.get("kv_cache_tokens")), _number(found.get("max_model_len"))
    return LogFacts(
        vllm_version=found.get("vllm_version"),
        kv_cache_tokens=None if tokens is None else int(tokens),
        max_concurrency=_number(found.get("max_concurrency")),
        max_model_len=None if length is None else int(length),
        available_kv_bytes=None if gib is None else int(gib * 1024**3),
    )


def _number(text: str | None) -> float | None:
    return None if text is None else float(text.replace(",", ""))


# Markers of a start, in its order, and the words in which people follow it.
_PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"non-default args|Initializing an? (?:V1 )?LLM engine", "reading the configuration"),
        (r"Starting to load model|Loading (?:safetensors|model weights|pt )", "loading weights"),
        (r"Loading (?:model )?weights took|Model loading took|Memory profiling|[Ee]ncoder cache", "profiling memory"),
        (r"torch\.compile|Dynamo bytecode|Compiling|Warming up model", "compiling"),
        (r"KV cache size|KV cache memory|GiB for KV cache|# \w+ blocks", "setting up the KV cache"),
        (r"Captur(?:ing|e) (?:CUDA |cuda|ACL )?[Gg]raphs|Capturing the model|Graph capturing", "capturing graphs"),
        (r"init engine \(|Starting vLLM|Started server process|Waiting for application startup", "starting the API"),
    )
)


def phase(line: str) -> str | None:
    """Return the phase of the start that this line of the log marks, or None."""
    text = strip(line).text
    return next((words for pattern, words in reversed(_PHASES) if pattern.search(text)), None)


class Progress:
    """Follows the log from where it was read last; tells when it last grew and which phase it has come to."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.grown_at = monotonic()
        self._path = path
        self._tell = tell
        self._offset = 0
        self._phase: str | None = None

    def read(self) -> None:
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read(1 << 20)
        if not data:
            return
        self._offset += len(data)
        self.grown_at = monotonic()
        found = [words for line in data.decode(errors="replace").splitlines() if (words := phase(line))]
        if found and found[-1] != self._phase:
            self._phase = found[-1]
            self._tell(self._phase)
