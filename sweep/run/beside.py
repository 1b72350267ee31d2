"""Whether vLLM judges a value beside other values of the other flags as it does beside the baseline's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sweep.config import SweepConfig
from sweep.model import Flags, FlagValue
from sweep.run.value_check import Checks, ValueCheck, same_config, surely_refused
from sweep.serve.parser_check import ParsedConfig

_MOST_ASKED = 300
_FEW = 6  # values of a flag that are all taken; of more, only both ends
_REFUSED = "refused"


def questions(config: SweepConfig, checks: Checks) -> dict[str, Flags]:
    """Return the flags that vLLM is asked about: what it refused, and what made no difference, beside other values.

    Each under the key that `confirmed` looks for. Nothing where nothing is in doubt. What does not fit among the most
    that are asked is left out as a whole.
    """
    groups = list(_doubtful(checks))
    for few in (_FEW, 2):
        asked = {name: _companies(config, name, few) for name, _ in groups}
        if sum(len(asked[name]) * len(values) for name, values in groups) <= _MOST_ASKED:
            break
    found: dict[str, Flags] = {}
    for name, values in groups:
        new = {
            _key(name, value, number): {**flags, name: value}
            for value in values
            for number, flags in enumerate(asked[name])
        }
        if len(found) + len(new) <= _MOST_ASKED:
            found |= new
    return found


def confirmed(config: SweepConfig, checks: Checks, answers: Mapping[str, ParsedConfig]) -> Checks:
    """Return the checks after these answers.

    A value is forbidden if it is refused everywhere, and values stay together that are alike everywhere. Of what was
    not asked, nothing is known.
    """
    doubtful: dict[str, list[FlagValue]] = {}
    for name, values in _doubtful(checks):
        doubtful.setdefault(name, []).extend(values)
    found: Checks = {}
    for name, kept in checks.items():
        alone = not _companies(config, name, 2)
        found[name] = tuple(
            _judged(check, [] if alone else _answers(name, check.value, answers), alone=alone)
            if any(value is check.value for value in doubtful.get(name, ()))
            else check
            for check in kept
        )
    return found


def _doubtful(checks: Checks) -> Iterator[tuple[str, tuple[FlagValue, ...]]]:
    """Yield what was found beside the baseline's flags: each refused value, then each group of values alike."""
    for name, found in checks.items():
        yield from ((name, (check.value,)) for check in found if check.here)
    for name, found in checks.items():
        yield from ((name, group) for group in same_config(found) if len(group) > 1)


def _companies(config: SweepConfig, name: str, few: int) -> tuple[Flags, ...]:
    """Return the sets of flags, beside the baseline, that a flag's values may meet in a trial."""
    found: list[Flags] = []
    for other, param in config.search.params.items():
        if other != name:
            values = param.values()
            chosen = values if param.size <= few else (values[0], values[-1])
            found += [{**config.baseline, other: value} for value in chosen]
    told = json.dumps(config.baseline, sort_keys=True)
    found = [flags for flags in found if json.dumps(flags, sort_keys=True) != told]
    return (*found, *config.search.enqueue)


def _key(name: str, value: FlagValue, number: int) -> str:
    return f"{name}={json.dumps(value)} {number}"


def _answers(name: str, value: FlagValue, answers: Mapping[str, ParsedConfig]) -> list[ParsedConfig]:
    found: list[ParsedConfig] = []
    while (answer := answers.get(_key(name, value, len(found)))) is not None:
        found.append(answer)
    return found


def _judged(check: ValueCheck, answers: list[ParsedConfig], *, alone: bool) -> ValueCheck:
    if check.here:
        sure = alone or (bool(answers) and all(surely_refused(answer) for answer in answers))
        return replace(check, error=check.here, here=None) if sure else check
    if alone:
        return check
    made = [_made(answer) for answer in answers]
    beside = tuple(text for text in made if text is not None)
    return replace(check, beside=beside) if beside and len(beside) == len(made) else replace(check, changes=None)


def _made(answer: ParsedConfig) -> str | None:
    """Return what came of it as a text that is the same for the same; None where that is not known."""
    if answer.changes is not None:
        return json.dumps(answer.changes, sort_keys=True)
    return _REFUSED if surely_refused(answer) else None
