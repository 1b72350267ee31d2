"""What a rule about a message of vLLM is, and the plain text by which a line is known that could satisfy it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sweep.failure import FailureKind, Treatment

# A message may be the cause, a symptom whose cause lies in what was going on, a consequence, or only point to another.
CAUSE, SYMPTOM, CONSEQUENCE, WRAPPER = range(4)

_SHORTEST = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """A message and its meaning. Named groups of the pattern become bounds of the same name.

    needles: a line without any of them cannot satisfy the pattern. advice: "" where the kind's own advice says it all.
    flags: those that the message is about and does not name. any_level: the message counts in an INFO record as well.
    doubtful: the message counts only if nothing after it shows that the server went on.
    """

    kind: FailureKind
    treatment: Treatment
    pattern: re.Pattern[str]
    needles: tuple[bytes, ...]
    advice: str = ""
    rank: int = CAUSE
    flags: tuple[str, ...] = ()
    any_level: bool = False
    doubtful: bool = False


def rule(
    kind: FailureKind,
    treatment: Treatment,
    pattern: str,
    advice: str = "",
    *,
    words: tuple[str, ...] = (),
    rank: int = CAUSE,
    flags: tuple[str, ...] = (),
    any_level: bool = False,
    doubtful: bool = False,
) -> Rule:
    """Return a rule. words: its needles, where the pattern has no plain text that stands in every match."""
    needles = tuple(word.encode() for word in words) or needles_of(pattern)
    return Rule(kind, treatment, re.compile(pattern), needles, advice, rank, flags, any_level, doubtful)


def needles_of(pattern: str) -> tuple[bytes, ...]:
    """Return for each alternative of the pattern the longest plain text that every match of it holds.

    Raises ValueError where an alternative has none.
    """
    needles = []
    for alternative in _alternatives(pattern):
        longest = max(_plain_texts(alternative), key=len, default="")
        if len(longest) < _SHORTEST:
            raise ValueError(f"no plain text in {alternative!r}")
        needles.append(longest.encode())
    return tuple(needles)


# A character class, an escape, a group's opening, a quantifier, or one character.
_TOKEN = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|\(\?(?:P<\w+>|[:!=]|<[!=])|[*+?]\??|\{\d*,?\d*\}|.", re.DOTALL)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    depth, current = 0, list[str]()
    for token in _TOKEN.findall(pattern):
        if token == "|" and depth == 0:
            yield current
            current = []
            continue
        depth += token.startswith("(")
        depth -= token == ")"
        current.append(token)
    yield current


def _plain_texts(tokens: list[str]) -> Iterator[str]:
    """Yield the runs of plain characters outside of groups. What a quantifier may leave out is no part of one."""
    depth, run = 0, ""
    for token in tokens:
        if token.startswith("("):
            depth += 1
        plain = token[-1] if len(token) == 1 or (token[0] == "\\" and not token[1].isalnum()) else ""
        if depth == 0 and plain and token not in {".", "^", "$", ")", "|"} and token not in {"*", "+", "?"}:
            run += plain
            continue
        yield run[:-1] if token[0] in "*?{" and depth == 0 else run
        run = ""
        depth -= token == ")"
    yield run
