"""What is known before a launch: flags that cannot run here, and values that do the same as others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sweep.config import SweepConfig
from sweep.failure import Failure
from sweep.memory.bounds import Bounds
from sweep.memory.card import ModelCard, read_card
from sweep.memory.estimate import Estimate, compare, estimate
from sweep.memory.likelihood import Likelihood
from sweep.memory.shortage import Shortage
from sweep.memory.words import estimate_words
from sweep.model import DeviceMemory, Flags, Outcome, ServerFacts
from sweep.run import inert
from sweep.run.bounded import Bounded
from sweep.run.ledger import gpus_of
from sweep.run.preflight import Preflight
from sweep.serve.device import device_memory

_SPARED = "No launch was spent on it."


@dataclass(slots=True)
class Knowledge:
    """Grows with every outcome.

    see_memory: the memory of so many devices as the next launch will find it. card: the model's sizes, where its files
    are here. alike: for each flag the groups of its values that do the same.
    """

    config: SweepConfig
    checked: Preflight
    see_memory: Callable[[int], DeviceMemory | None]
    card: ModelCard | None = None
    alike: inert.Groups = field(default_factory=dict)
    _now: dict[int, DeviceMemory | None] = field(default_factory=dict)  # by the number of devices
    _roomiest: dict[int, DeviceMemory] = field(default_factory=dict)
    _bounds: Bounds = field(default_factory=lambda: Bounds((), {}))
    _likelihood: Likelihood = field(default_factory=lambda: Likelihood(Bounds((), {})))
    _seen: list[tuple[Flags, ServerFacts]] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def learn(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Take up all outcomes so far; return what is new and of interest to people."""
        defaults = self.checked.resolved
        self._bounds = Bounds(outcomes, self.config.serve.args, defaults, self.card)
        self._likelihood = Likelihood(self._bounds)  # kept: its fits are made once for all questions
        for outcome in outcomes:
            self._note_room(self._devices(outcome.flags), outcome.measured.memory)
        ran = [outcome for outcome in outcomes if outcome.state == "complete"]
        self._seen = [(self._together(outcome.flags), outcome.measured.server) for outcome in ran]
        configured = {name: self.checked.same_config(name) for name in self.config.search.params}
        self.alike = inert.alike(configured, outcomes)
        return [*self._new(inert.notes(self.alike).items()), *self._new(self._comparison(ran[:1]))]

    def expectation(self) -> str | None:
        """Say what the baseline will need of the device's memory, as far as the model's files are here."""
        if self.card is None:
            return None
        baseline = self.config.baseline
        return estimate_words(self._expected(self.card, baseline, self.see_memory(self._devices(baseline))))

    def look(self) -> None:
        """See how much memory there is now, for all questions until the next look."""
        self._now = {}

    def impossible(self, flags: Flags) -> Failure | None:
        """Return why a launch with these flags would be wasted, even with the most memory that was ever free here."""
        if reason := self.checked.refused(self.config.flags(flags)):
            return Failure("invalid_argument", "prune", reason, _SPARED)
        if not self.config.memory.skip:
            return None
        self._see(flags)
        short = self._short(flags, self._roomiest.get(self._devices(flags)))
        return Failure(short.kind, "prune", short.words, _SPARED) if short else None

    def lacks_room(self, flags: Flags) -> bool:
        """Tell whether something else holds the memory that these flags, which could run here, would need."""
        return self.config.memory.skip and self._short(flags, self._see(flags)) is not None

    def _short(self, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        short = self._bounds.excluded(flags, memory)
        if short is None and self.card is not None:
            expected = self._expected(self.card, flags, memory, self._seen)
            short = expected.certain or expected.likely
        return short or self._likelihood.excluded(flags, memory)

    def _see(self, flags: Flags) -> DeviceMemory | None:
        devices = self._devices(flags)
        if devices not in self._now:
            self._now[devices] = self.see_memory(devices)
            self._note_room(devices, self._now[devices])
        return self._now[devices]

    def _note_room(self, devices: int, memory: DeviceMemory | None) -> None:
        before = self._roomiest.get(devices)
        if memory is not None and (before is None or memory.free_bytes > before.free_bytes):
            self._roomiest[devices] = memory

    def _devices(self, flags: Flags) -> int:
        return gpus_of(self.config.flags(flags))

    def _together(self, flags: Flags) -> Flags:
        return {**self.checked.resolved, **self.config.flags(flags)}

    def _expected(
        self,
        card: ModelCard,
        flags: Flags,
        memory: DeviceMemory | None,
        seen: Sequence[tuple[Flags, ServerFacts]] = (),
    ) -> Estimate:
        return estimate(card, self._together(flags), memory, seen)

    def _comparison(self, first: Sequence[Outcome]) -> Iterable[tuple[str, str]]:
        """Say what was expected of the first launch that ran, and what its log said."""
        for outcome in first if self.card else ():
            assert self.card is not None
            expected = self._expected(self.card, outcome.flags, outcome.measured.memory)
            words = [figure.words for figure in compare(expected, outcome.measured.server)]
            if words:
                yield "memory", f"Memory in trial {outcome.trial}: {'; '.join(words)}."

    def _new(self, said: Iterable[tuple[str, str]]) -> list[str]:
        """Return the texts that have not been said yet, by their keys."""
        texts = {key: text for key, text in said if key not in self._said}
        self._said.update(texts)
        return list(texts.values())


def what_is_known(config: SweepConfig, checked: Preflight) -> Knowledge:
    """Return what is known before the first launch on this machine."""
    env = os.environ | config.serve.env

    def see(devices: int) -> DeviceMemory | None:
        return device_memory(env, checked.platform, count=devices)

    return Knowledge(config, checked, Bounded(see), read_card(config.serve.model, config.serve.revision, env))
