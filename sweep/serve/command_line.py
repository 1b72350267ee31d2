"""A pasted `vllm serve …` line, taken apart into flags without a vLLM to ask."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from sweep.model import Flags, FlagValue
from sweep.serve.vllm_flags import ONLY_ON, normalise, refusal

# On a command line these take no value. Nearly all others of the kind begin with `enable-` or `disable-`.
_SWITCHES = frozenset(
    {
        "allow-credentials",
        "allow-deprecated-quantization",
        "async-scheduling",
        "cohere-is-reasoning-model",
        "cudagraph-metrics",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "dcp-q-replicate",
        "enforce-eager",
        "exclude-tools-when-tool-choice-none",
        "fail-on-environ-validation",
        "fully-sharded-loras",
        "grpc",
        "headless",
        "interleave-mm-strings",
        "jit-monitor-verbose",
        "kv-cache-metrics",
        "kv-sharing-fast-prefill",
        "language-model-only",
        "log-error-stack",
        "long-prefill-token-threshold-adaptive",
        "mm-device-do-normalize",
        "mm-encoder-only",
        "numa-bind",
        "ray-workers-use-nsight",
        "return-sampling-mask",
        "return-tokens-as-token-ids",
        "scheduler-reserve-full-isl",
        "skip-mm-profiling",
        "skip-tokenizer-init",
        "sleep-mode-offload-cudagraph",
        "specialize-active-lora",
        "swa-bounded-replay",
        "tokens-only",
        "trust-remote-code",
        "trust-request-chat-template",
        "trust-request-mm-kwargs",
        "use-fp64-gumbel",
        "use-replayssm",
        "use-tqdm-on-load",
        *ONLY_ON,
    }
)

_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_SHELL_REST = re.compile(r"\d?>.*|[|&;]+")  # a redirection, a pipe or the end of the command


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A pasted command. dropped: what was left out because the sweep sets it itself, as it stood there."""

    model: str | None
    flags: Flags
    dropped: tuple[str, ...]


def parse_command_line(text: str) -> CommandLine:
    """Read a `vllm serve MODEL --flag value …` line as people keep it, in one line or with backslashes at line ends.

    Values of an unknown kind are kept as text. Raises ValueError when the text is no such command.
    """
    model, tokens = _command_tokens(text)
    flags: Flags = {}
    dropped: list[str] = []
    for name, values in _options(tokens):
        if name == "model" and values:
            model = values[0]
        elif refusal(name, allow_remote_code=True):
            dropped.append(f"--{name}")
        elif not name:
            model = model or values[0]
        elif name.startswith("no-") and not values:
            flags[name.removeprefix("no-")] = False
        else:
            flags[name] = _option_value(values)
    return CommandLine(model, flags, tuple(dropped))


def _command_tokens(text: str) -> tuple[str | None, list[str]]:
    """Return the model that follows `serve`, if one does, and the words behind it up to the end of the command."""
    try:
        # A backslash that has lost its line break, as when YAML folds the lines, means the same as one at a line's end.
        words = shlex.split(re.sub(r"\\(\s+|$)", " ", text))
    except ValueError as error:
        raise ValueError(f"this is not a command line: {error}") from None
    starts = [i for i, word in enumerate(words) if word == "serve" or word.startswith("vllm.entrypoints.")]
    if not starts:
        raise ValueError("no `vllm serve` in this command line: paste it as `vllm serve MODEL --flag value …`")
    words = words[starts[0] + 1 :]
    end = next((i for i, word in enumerate(words) if _SHELL_REST.fullmatch(word)), len(words))
    words = words[:end]
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    return None, words


def _options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, values) for each option; words that belong to none come under an empty name."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not _is_option(word):
            yield "", [word]
            continue
        if level := re.fullmatch(r"-O=?(\d)", word):
            yield "optimization-level", [level[1]]
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = normalise(name)
        values = [value] if equals else []
        while not equals and not _is_switch(name) and i < len(words) and not _is_option(words[i]):
            values.append(words[i])
            i += 1
        yield name, values


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not (_INTEGER.fullmatch(word) or _DECIMAL.fullmatch(word))


def _is_switch(name: str) -> bool:
    if name == "disable-access-log-for-endpoints":
        return False
    return name in _SWITCHES or name.startswith(("enable-", "disable-", "no-"))


def _option_value(values: list[str]) -> FlagValue:
    if not values:
        return True
    if len(values) == 1:
        return _scalar(values[0])
    return [_scalar(value) for value in values]


def _scalar(text: str) -> FlagValue:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if text.startswith(("{", "[")):
        try:
            value: FlagValue = json.loads(text)
        except json.JSONDecodeError:
            return text
        return value
    return text
