"""What vLLM makes of each value of a swept flag, the other flags being the baseline's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sweep.config import SweepConfig
from sweep.errors import ConfigError
from sweep.model import Flags, FlagValue
from sweep.search.space import Rule
from sweep.serve.failures import classify
from sweep.serve.parser_check import Comparison, ParsedConfig
from sweep.serve.vllm_flags import PLATFORM_RULES, RULES, refusal
from sweep.text import flag_value

# A configuration is built in some milliseconds, but a model of the hub may be looked up there each time.
_MOST_OF_A_FLAG = 40
_MOST_IN_ALL = 150
_REFUSALS_SHOWN = 6
_REFUSING = frozenset({"invalid_argument", "unsupported_feature"})


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """error: why vLLM refuses the value whatever the other flags are; None also where it takes it with some of them.

    changes: what of the engine's whole configuration is otherwise than with the baseline's flags, by its place
    (`scheduler_config.max_num_seqs`) and as text; None where that is not known: the value was refused, or the engine's
    configuration does not show this flag. here: why vLLM refuses it beside the baseline's other flags, where it may
    take it beside others. beside: of each other company that it was tried in, what came of it.
    """

    value: FlagValue
    error: str | None = None
    changes: dict[str, str | None] | None = None
    here: str | None = None
    beside: tuple[str, ...] = ()


Checks: TypeAlias = dict[str, tuple[ValueCheck, ...]]


def values_to_ask(config: SweepConfig) -> dict[str, tuple[FlagValue, ...]]:
    """Return of each swept flag the values that vLLM is asked about: all, or evenly chosen ones with both ends."""
    params = config.search.params
    most = min(_MOST_OF_A_FLAG, max(2, _MOST_IN_ALL // len(params)))
    return {name: tuple(param.values()[index] for index in _spread(param.size, most)) for name, param in params.items()}


def _spread(size: int, most: int) -> Sequence[int]:
    return range(size) if size <= most else [part * (size - 1) // (most - 1) for part in range(most)]


def platform_rules(platform: str | None, resolved: Flags, told: Flags) -> tuple[str, ...]:
    """Return the rules that this platform adds; not those that vLLM's own choice for this model does not keep.

    told: what the user set; it was not vLLM's choice.
    """
    chosen = {name: value for name, value in resolved.items() if name not in told}
    return tuple(text for text in PLATFORM_RULES.get(platform or "", ()) if Rule.parse(text).allows(chosen))


def check_values(
    config: SweepConfig, comparison: Comparison, platform: str | None, baseline: ParsedConfig, known: Collection[str]
) -> Checks:
    """Return what vLLM makes of the values beside the baseline's other flags.

    comparison: holds each value under the key that `key_of` spells. known: the names of all flags.
    """
    added = platform_rules(platform, baseline.resolved or {}, config.flags(config.baseline))
    rules = tuple(Rule.parse(text) for text in (*RULES, *added))
    checks: Checks = {}
    for name, values in values_to_ask(config).items():
        found = []
        for number, value in enumerate(values):
            parsed = comparison.compared.get(key_of(name, number), ParsedConfig())
            error = _broken_rule(config, name, value, rules)
            here = None
            if error is None and parsed.error:
                together = {**(baseline.resolved or {}), **config.flags(config.baseline), name: value}
                explained = any(len(rule.names) > 1 and not rule.allows(together) for rule in rules)
                here = None if explained else _blamed(name, parsed.error, known)
            changes = parsed.changes if name.partition(".")[0] in comparison.shown and not error else None
            found.append(ValueCheck(value, error, changes, here))
        checks[name] = tuple(found)
    return checks


def refuse_hopeless(config: SweepConfig, checks: Checks) -> None:
    """Raise ConfigError for a flag of which no value can be had."""
    if problems := list(_hopeless(config, checks)):
        raise ConfigError("\n".join(problems))


def key_of(name: str, number: int) -> str:
    return f"search.params.{name}.{number}"


def _broken_rule(config: SweepConfig, name: str, value: FlagValue, rules: Iterable[Rule]) -> str | None:
    """Return what a value breaks whatever the other swept flags are."""
    certain = {flag: fixed for flag, fixed in config.serve.args.items() if not _may_change(config, flag)} | {
        name: value
    }
    broken = next((rule for rule in rules if name in rule.names and not rule.allows(certain)), None)
    return f"it breaks the rule {broken.text!r}" if broken else None


def _may_change(config: SweepConfig, flag: str) -> bool:
    """Tell whether some trials may have another value of a fixed flag."""
    return any(flag in flags for flags in (config.baseline, *config.search.enqueue))


def _blamed(name: str, error: str, known: Collection[str]) -> str | None:
    """Return vLLM's reason against a value, if the message speaks of this flag and of no other."""
    failure = classify(error, exit_code=1, phase="start", swept=(name,))
    if failure.kind not in _REFUSING:
        return None
    head = name.partition(".")[0]
    message = failure.evidence
    # What every launch sets itself (`config`, `model`) is in many messages and never differs.
    others = (other for other in known if other != head and not refusal(other, allow_remote_code=True))
    if _names(message, head) and not any(_names(message, other) for other in others):
        return re.sub(r"^(?:Value error, |\w+Error: )", "", message).rstrip(".")
    return None


def surely_refused(parsed: ParsedConfig) -> bool:
    """Tell whether vLLM refuses flags for what they are, and not because the model or its hub was not to be had."""
    return bool(parsed.error) and classify(parsed.error or "", exit_code=1, phase="start").kind in _REFUSING


def _names(message: str, flag: str) -> bool:
    """Tell whether a message names a flag, be it with dashes, underscores or spaces."""
    spelling = r"[-_ ]".join(map(re.escape, flag.split("-")))
    return re.search(rf"(?<![\w-]){spelling}(?![\w-])", message, re.IGNORECASE) is not None


def _hopeless(config: SweepConfig, checks: Checks) -> Iterator[str]:
    for name, found in checks.items():
        if len(found) == config.search.params[name].size and all(check.error for check in found):
            key = ("search", "params", name)
            yield f"{config.place(key)}: vLLM takes none of the values; {flag_value(found[0].value)}: {found[0].error}"


def refusal_notes(checks: Checks) -> list[str]:
    """Say of each flag which of its values are refused, and why."""
    notes = []
    for name, found in checks.items():
        if told := _reasons([(check.value, check.error) for check in found if check.error]):
            notes.append(f"search.params.{name}: vLLM refuses {told}. Such configurations are skipped.")
        if told := _reasons([(check.value, check.here) for check in found if check.here]):
            notes.append(
                f"search.params.{name}: beside the baseline's other flags vLLM refuses {told}. Beside others it may "
                "take them, so none is skipped for that."
            )
    return notes


def _reasons(refused: Sequence[tuple[FlagValue, str]]) -> str:
    if not refused:
        return ""
    values = ", ".join(flag_value(value) for value, _ in refused[:_REFUSALS_SHOWN])
    more = ", …" if len(refused) > _REFUSALS_SHOWN else ""
    same = len({reason for _, reason in refused}) == 1
    which = "" if same else f" of {flag_value(refused[0][0])} it says:"
    return f"{values}{more}:{which} {refused[0][1]}"


def refused(checks: Checks, flags: Flags) -> str | None:
    """Return why vLLM refuses these flags, if one of them alone is the reason."""
    for name, value in flags.items():
        for check in checks.get(name, ()):
            if check.error and _equal(check.value, value):
                return f"vLLM refuses {name} {flag_value(value)}: {check.error}"
    return None


def _equal(one: FlagValue, other: FlagValue) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def same_config(found: Iterable[ValueCheck]) -> tuple[tuple[FlagValue, ...], ...]:
    """Group values by the configuration that the engine would have; a value unlike all others is a group of its own.

    A value that stands in no group is not known, and may be like any other or like none.
    """
    groups: dict[tuple[object, ...], list[FlagValue]] = {}
    for check in found:
        if check.changes is not None:
            groups.setdefault((*sorted(check.changes.items()), check.beside), []).append(check.value)
    return tuple(map(tuple, groups.values()))
