"""Lengths in tokens: one number, or a distribution."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from sweep.section import Section

MAX_TOKENS = 10_000_000  # far beyond every context, and small enough for whatever is computed from it
_TAIL_STDS = 4  # of a hundred thousand normal lengths three lie further out


class Lengths(Section):
    """A distribution of lengths, rounded to whole tokens and clipped to min … max.

    mean and std are those of the lengths themselves, before they are clipped, for the lognormal distribution too: its
    logarithm has the variance v = ln(1 + (std / mean)^2) and the mean ln(mean) - v / 2.
    """

    mean: float = Field(ge=1, le=MAX_TOKENS)
    std: float = Field(ge=0, le=MAX_TOKENS)
    min: int = Field(default=1, ge=1, le=MAX_TOKENS, strict=True)
    max: int | None = Field(default=None, ge=1, le=MAX_TOKENS, strict=True, description="mean + 4 std unless given")
    distribution: Literal["normal", "lognormal"] = "normal"

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if not self.min <= self.mean <= self.longest:
            raise ValueError(f"mean {self.mean:g} does not lie between min {self.min} and max {self.longest}")
        return self

    @property
    def longest(self) -> int:
        return math.ceil(self.mean + _TAIL_STDS * self.std) if self.max is None else self.max

    def at(self, normal: float) -> int:
        """Return the length that a draw from the standard normal distribution stands for."""
        if self.distribution == "normal":
            value = self.mean + self.std * normal
        else:
            variance = math.log1p((self.std / self.mean) ** 2)
            value = math.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal)
        return min(max(round(value), self.min), self.longest)


def _form(value: Any) -> str:
    return "(mapping)" if isinstance(value, dict | Lengths) else "(number)"


Length: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True), Tag("(number)")] | Annotated[Lengths, Tag("(mapping)")],
    Discriminator(_form),
]


def longest(length: int | Lengths) -> int:
    return length if isinstance(length, int) else length.longest


def shortest(length: int | Lengths) -> int:
    return length if isinstance(length, int) else length.min


def words(length: int | Lengths) -> str:
    """Write a length for people: 1,024 tokens, or 1,024 ± 300 tokens."""
    if isinstance(length, int):
        return f"{length:,} tokens"
    return f"{length.mean:,.0f} ± {length.std:,.0f} tokens"
