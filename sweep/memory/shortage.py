"""What would be short, and why that is known."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.failure import FailureKind


@dataclass(frozen=True, slots=True)
class Shortage:
    """kind: how such a launch would fail. words: the reason, with the numbers and the trial it rests on."""

    kind: FailureKind
    words: str

    def __str__(self) -> str:
        return self.words
