"""What is sent: the `load` section of a search space, and the levels that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sweep.section import Section


@dataclass(frozen=True, slots=True)
class Level:
    """One intensity of the load: a number of requests kept in flight, or a rate of arrivals."""

    name: str  # "c=64", "r=8"
    concurrency: int | None = None
    rate_rps: float | None = None


class PromptShape(Section):
    """Lengths in tokens. `shared_prefix` is the part that all prompts of a group begin with."""

    tokens: int = Field(ge=1)
    shared_prefix: int = Field(default=0, ge=0)
    groups: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _leaves_a_tail(self) -> Self:
        if self.shared_prefix >= self.tokens:
            raise ValueError(
                f"shared_prefix {self.shared_prefix} leaves {self.tokens - self.shared_prefix} of {self.tokens} tokens"
                f" that differ between prompts; it can be at most {self.tokens - 1}"
            )
        return self


class OutputShape(Section):
    """Length in tokens; every answer is made exactly this long where the server allows it."""

    tokens: int = Field(ge=1)


class LoadSection(Section):
    """The traffic: either a fixed concurrency (closed loop) or Poisson arrivals at a rate (open loop)."""

    concurrency: int | list[int] | None = None
    rate: float | list[float] | None = None
    prompt: PromptShape
    output: OutputShape
    seconds: float | None = Field(default=None, gt=0)
    requests: int | None = Field(default=None, ge=1)
    endpoint: Literal["completions", "chat"] = "completions"
    request_timeout_s: float = Field(default=600, gt=0)
    stall_timeout_s: float = Field(default=60, gt=0)

    @field_validator("rate", mode="before")
    @classmethod
    def _is_a_number(cls, rate: Any) -> Any:
        if rate == "max":
            raise ValueError("max, the highest rate under the SLOs, is not available yet; give one or several rates")
        return rate

    @field_validator("concurrency", "rate", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) for v in values) or value == []:
            raise ValueError("expected a number above 0, or a list of them")
        return value

    @field_validator("concurrency", "rate")
    @classmethod
    def _is_positive(cls, value: Any) -> Any:
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number <= 0:
                raise ValueError(f"{number} is not above 0")
        return value

    @model_validator(mode="after")
    def _is_one_load(self) -> Self:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either concurrency (requests kept in flight) or rate (requests a second), not both")
        if self.seconds is not None and self.requests is not None:
            raise ValueError("give either seconds or requests, not both: a level ends by one of them")
        names = [level.name for level in self.levels()]
        if len(set(names)) < len(names):
            raise ValueError(f"a level stands in the list twice: {', '.join(names)}")
        return self

    @property
    def window_s(self) -> float | None:
        """How long requests are counted; None where their number decides."""
        return None if self.requests is not None else self.seconds or 60.0

    def levels(self) -> tuple[Level, ...]:
        if self.concurrency is not None:
            counts = self.concurrency if isinstance(self.concurrency, list) else [self.concurrency]
            return tuple(Level(f"c={count}", concurrency=count) for count in counts)
        rates = self.rate if isinstance(self.rate, list) else [self.rate]
        return tuple(Level(f"r={rate:g}", rate_rps=rate) for rate in rates if rate is not None)
