"""What a rule about a message of vLLM is, and the plain text by which a line is known that could satisfy it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sweep.failure import FailureKind, Treatment

# A message may be the cause, a symptom whose cause lies in what was going on, a consequence, or only point to another.
CAUSE, SYMPTOM, CONSEQUENCE, WRAPPER = range(4)

# The module in front of an exception's name. Bounded, as everything is that may be tried at every place of a line.
MODULE = r"(?:[\w.]{1,120}\.)?"

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
_PART = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|\(\?(?:P<\w+>|[:!=]|<[!=])|[*+?]\??|\{\d*,?\d*\}|.", re.DOTALL)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    depth, current = 0, list[str]()
    for part in _PART.findall(pattern):
        if part == "|" and depth == 0:
            yield current
            current = []
            continue
        depth += part.startswith("(")
        depth -= part == ")"
        current.append(part)
    yield current


def _plain_texts(parts: list[str]) -> Iterator[str]:
    """Yield the runs of plain characters outside of groups. What a quantifier may leave out is no part of one."""
    depth, run = 0, ""
    for part in parts:
        if part.startswith("("):
            depth += 1
        plain = part[-1] if len(part) == 1 or (part[0] == "\\" and not part[1].isalnum()) else ""
        if depth == 0 and plain and part not in {".", "^", "$", ")", "|"} and part not in {"*", "+", "?"}:
            run += plain
            continue
        yield run[:-1] if part[0] in "*?{" and depth == 0 else run
        run = ""
        depth -= part == ")"
    yield run
