"""What is known before a launch: flags that cannot run here, and values that do the same as others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sweep.config import SweepConfig
from sweep.failure import Failure
from sweep.model import DeviceMemory, Flags, Outcome
from sweep.run.preflight import Preflight


@dataclass(slots=True)
class Knowledge:
    """Grows with every outcome. see_memory: the device's memory as the next launch will find it."""

    config: SweepConfig
    checked: Preflight
    see_memory: Callable[[], DeviceMemory | None]
    outcomes: Sequence[Outcome] = field(default=())

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes

    def impossible(self, flags: Flags) -> Failure | None:
        """Return why a launch with these flags would be wasted, or None."""
        return None
