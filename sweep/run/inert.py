"""Values of a flag that do the same: found before and during a sweep, so that none is measured under two names. Pure.

Two sources have to agree: the engine's configuration that vLLM builds from each value before the sweep, and what the
running server says of itself (`vllm:cache_config_info`). A flag that shows in neither may still do something.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from sweep.model import FlagValue, Outcome
from sweep.text import flag_value

Groups = dict[str, list[tuple[FlagValue, ...]]]


def alike(configured: Mapping[str, Sequence[tuple[FlagValue, ...]]], outcomes: Sequence[Outcome]) -> Groups:
    """Return for each flag the groups of two or more of its values that do the same.

    configured: of each flag the values that make one and the same configuration of the engine. Only values that have
    run stay together, and where the running server has a figure for the flag, only those with the same one.
    """
    found: Groups = {}
    running = [outcome for outcome in outcomes if outcome.measured.server.cache_config]
    if not running:
        return found
    for name, groups in configured.items():
        label = name.replace("-", "_")
        parts = [part for group in groups for part in _seen_alike(group, name, label, running)]
        if together := [part for part in parts if len(part) > 1]:
            found[name] = together
    return found


def _seen_alike(
    group: Iterable[FlagValue], name: str, label: str, running: Sequence[Outcome]
) -> list[tuple[FlagValue, ...]]:
    """Part a group by what the running server said of each value; a value that has not run, or varied, stands alone."""
    by_figure: dict[str | None, list[FlagValue]] = {}
    for value in group:
        figures = {
            outcome.measured.server.cache_config.get(label)
            for outcome in running
            if name in outcome.flags and _key(outcome.flags[name]) == _key(value)
        }
        if len(figures) == 1:
            by_figure.setdefault(figures.pop(), []).append(value)
    return [tuple(values) for values in by_figure.values()]


def notes(groups: Groups) -> dict[str, str]:
    """Say of each group what it means; by a key that stays the same while the group does."""
    return {
        f"{name} {_key(list(group))}": (
            f"{name}: {' and '.join(map(flag_value, group))} do the same here, as the engine's configuration and the"
            f" running server show; only {flag_value(group[0])} is tried from now on."
        )
        for name, alike_values in groups.items()
        for group in alike_values
    }


def _key(value: FlagValue) -> str:
    return json.dumps(value, sort_keys=True)
