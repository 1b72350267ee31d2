"""What vLLM's log of a start says: its figures, and how far it has come.

Wordings are those of vLLM 0.4 to 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from sweep.serve.log_lines import Reader, opened, strip

_NO_FIGURE = 1e15  # what damaged logs hold


class LogFacts(NamedTuple):
    """The figures of a start. Where several engines or workers each say theirs, the first of them."""

    vllm_version: str | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    available_kv_bytes: int | None = None
    weights_bytes: int | None = None
    graphs_bytes: int | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


class _Wording(NamedTuple):
    """A line with figures; the names of its groups are facts, _gib for _bytes. needle: stands in every such line."""

    needle: bytes
    pattern: re.Pattern[str]


# The size of the cache and the concurrency stand in one line since the middle of 2026, with thousands separators since
# 0.8. The CPU backend sets its cache instead of measuring what is free. V0's blocks are of 16 tokens unless told.
_WORDINGS = tuple(
    _Wording(needle.encode(), re.compile(pattern))
    for needle, pattern in (
        ("version", r"\bversion (?P<vllm_version>\d+\.\d+[\w.+]*)"),
        ("with config", r"\(v(?P<vllm_version>\d+\.\d+[\w.+]*)\) with config"),
        ("KV cache size: ", r"KV cache size: (?P<kv_cache_tokens>[\d,]+) tokens"),
        (
            "Maximum concurrency for ",
            r"Maximum concurrency for (?P<max_model_len>[\d,]+) tokens per request: (?P<max_concurrency>[\d.,]+)x",
        ),
        ("Available KV cache memory: ", r"Available KV cache memory: (?P<available_kv_gib>-?[\d.]+) Gi?B"),
        (
            "GiB for KV cache",
            (
                r"(?:Explicitly|Auto) set \((?P<available_kv_gib>[\d.]+)/(?P<total_gib>[\d.]+)\) GiB for KV cache"
                r"(?: on node \d+, with (?P<requested_gib>[\d.]+) GiB requested)?"
            ),
        ),
        (
            "memory for KV Cache as specified",
            r"Initial free memory (?P<free_gib>[\d.]+) GiB, reserved (?P<available_kv_gib>[\d.]+) GiB memory for KV",
        ),
        ("reserved for KV Cache is ", r"reserved for KV Cache is (?P<available_kv_gib>-?[\d.]+) ?GiB"),
        ("kv_cache_size=", r"\bkv_cache_size=(?P<available_kv_gib>-?[\d.]+) ?GiB"),
        ("total_gpu_memory=", r"total_gpu_memory=(?P<total_gib>[\d.]+) ?GiB"),
        ("odel loading took ", r"odel loading took (?P<weights_gib>[\d.]+) Gi?B"),
        ("oading model weights took ", r"oading model weights took (?P<weights_gib>[\d.]+) Gi?B"),
        ("model weights take ", r"model weights take (?P<weights_gib>[\d.]+) ?GiB"),
        ("Graph capturing finished", r"Graph capturing finished in .{1,30}, took (?P<graphs_gib>[\d.]+) GiB"),
        ("CUDA graph pool memory: ", r"CUDA graph pool memory: (?P<graphs_gib>[\d.]+) GiB \(actual\)"),
        (
            "on startup. Desired",
            (
                r"\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup\. Desired \w+ memory utilization is "
                r"\([\d.]+, (?P<requested_gib>[\d.]+) GiB\)"
            ),
        ),
        (
            "the current vLLM instance can use",
            (
                r"total_gpu_memory \((?P<total_gib>[\d.]+) ?GiB\) x gpu_memory_utilization \([\d.]+\) = "
                r"(?P<requested_gib>[\d.]+) ?GiB"
            ),
        ),
        (
            "Initial free memory: ",
            (
                r"Initial free memory: (?P<free_gib>[\d.]+) GiB; Requested memory: [\d.]+ \(util\), "
                r"(?P<requested_gib>[\d.]+) GiB"
            ),
        ),
    )
)


def facts(log: Path | str) -> LogFacts:
    """Return what the log says of the start; None for what it does not say. log: its path, or its text."""
    reader = Reader(opened(log), any_level={wording.needle for wording in _WORDINGS})
    said: dict[str, str] = {}
    for found in reader:
        for wording in _WORDINGS:
            match = wording.pattern.search(found.line.text) if wording.needle in found.words else None
            for name, value in match.groupdict().items() if match else ():
                if value is not None:
                    said.setdefault(name, value)
        reader.any_level = {
            wording.needle for wording in _WORDINGS if not wording.pattern.groupindex.keys() <= said.keys()
        }
    whole = {
        f"{name[:-4]}_bytes" if name.endswith("_gib") else name: int(
            value * 1024**3 if name.endswith("_gib") else value
        )
        for name, text in said.items()
        if name not in {"vllm_version", "max_concurrency"} and (value := number(text)) is not None
    }
    return LogFacts(said.get("vllm_version"), max_concurrency=number(said.get("max_concurrency", "")), **whole)


def number(text: str) -> float | None:
    """Read a figure as a log writes it, with thousands separators or the full stop of its sentence behind it."""
    with suppress(ValueError):
        value = float(text.rstrip(".,").replace(",", ""))
        return value if abs(value) < _NO_FIGURE else None
    return None


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
