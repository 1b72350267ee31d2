"""What is sent: the `load` section of a search space, and the levels that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from sweep.load.shapes import BodyFields, Kind, MixClass, OutputShape, PromptShape, field_problems
from sweep.section import Section

_MOST = 100_000  # conversations in flight, or requests a second: more than a machine's ports and clients can give


@dataclass(frozen=True, slots=True)
class Level:
    """One intensity of the load: a number of requests kept in flight, or a rate of arrivals."""

    name: str  # "c=64", "r=8", "r=2..20", "r=max", "trace"
    concurrency: int | None = None
    rate_rps: float | None = None  # of a ramp where it begins
    to_rps: float | None = None  # where a ramp ends, after `seconds`
    search: bool = False  # the highest rate under the SLOs is looked for
    trace: bool = False  # at the times of the file


class Ramp(Section):
    """A rate that changes evenly over the window."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    from_rps: float = Field(alias="from", gt=0, le=_MOST)
    to_rps: float = Field(alias="to", gt=0, le=_MOST)


def _form(value: Any) -> str:
    forms = {"(mapping)": dict | Ramp, "(list)": list | tuple, "(word)": str}
    return next((form for form, types in forms.items() if isinstance(value, types)), "(number)")


Rate: TypeAlias = Annotated[
    Annotated[float, Tag("(number)")]
    | Annotated[list[float], Tag("(list)")]
    | Annotated[Literal["max"], Tag("(word)")]
    | Annotated[Ramp, Tag("(mapping)")],
    Discriminator(_form),
]
Processes: TypeAlias = Annotated[
    Annotated[Literal["auto"], Tag("(word)")] | Annotated[int, Field(ge=1, le=64, strict=True), Tag("(number)")],
    Discriminator(_form),
]


class LoadSection(Section):
    """The traffic: a fixed concurrency (closed loop), arrivals at a rate, or those of a trace (open loop)."""

    concurrency: int | list[int] | None = None
    rate: Rate | None = None
    trace: str | None = None
    trace_speed: float = Field(default=1.0, gt=0)
    arrivals: Literal["poisson", "constant", "gamma"] | None = None
    burstiness: float | None = Field(default=None, gt=0)
    prompt: PromptShape | None = None
    output: OutputShape | None = None
    turns: int = Field(default=1, ge=1, le=256, strict=True)
    think_s: float = Field(default=0.0, ge=0, le=86_400)
    mix: tuple[MixClass, ...] = ()
    request: BodyFields = Field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    seconds: float | None = Field(default=None, gt=0)
    requests: int | None = Field(default=None, ge=1)
    endpoint: Literal["completions", "chat"] = "completions"
    request_timeout_s: float = Field(default=600, gt=0)
    stall_timeout_s: float = Field(default=60, gt=0)
    processes: Processes = "auto"

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
            if isinstance(number, int | float) and number <= 0:
                raise ValueError(f"{number} is not above 0")
            if isinstance(number, int | float) and number > _MOST:
                raise ValueError(f"a level is above {_MOST:,}, which no client can make")
        return value

    @field_validator("rate")
    @classmethod
    def _ascends(cls, rate: Any) -> Any:
        if isinstance(rate, list) and rate != sorted(rate):
            raise ValueError(
                "the rates must ascend: they run in this order, and one that the server cannot keep up with ends a"
                f" trial's later levels; write {', '.join(f'{each:g}' for each in sorted(rate))}"
            )
        return rate

    @model_validator(mode="after")
    def _is_one_load(self) -> Self:
        if sum(given is not None for given in (self.concurrency, self.rate, self.trace)) != 1:
            raise ValueError(
                "give either concurrency (requests kept in flight) or rate (requests a second), not both;"
                " or trace (a file with times) in place of the two"
            )
        if self.seconds is not None and self.requests is not None:
            raise ValueError("give either seconds or requests, not both: a level ends by one of them")
        names = [level.name for level in self.levels()]
        if len(set(names)) < len(names):
            raise ValueError(f"a level stands in the list twice: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [*self._arrival_problems(), *self._class_problems()]
        if self.trace is not None:
            problems += self._trace_problems()
        else:
            problems += [problem for kind in self.kinds for problem in kind.problems(self.endpoint)]
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        return self

    def _arrival_problems(self) -> Iterator[str]:
        if self.rate is None:
            for name in ("arrivals", "burstiness"):
                if getattr(self, name) is not None:
                    yield f"{name} is about a rate; give rate, or leave it out"
        elif (self.burstiness is None) == (self.arrivals == "gamma"):
            yield "burstiness is the shape of gamma arrivals: give both `arrivals: gamma` and burstiness, or neither"
        if isinstance(self.rate, Ramp) and self.seconds is None:
            yield "a ramp runs from one rate to the other over the window; give seconds"
        if self.trace is None and self.trace_speed != 1:
            yield "trace_speed goes with trace"

    def _class_problems(self) -> Iterator[str]:
        names = [each.name for each in self.mix]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"mix: two classes are named {name!r}"

    def _trace_problems(self) -> Iterator[str]:
        lengths = self.output is not None and self.output.tokens is not None
        for name, given in (("prompt", self.prompt), ("output.tokens", lengths), ("mix", self.mix)):
            if given:
                yield f"{name} does not go with trace, whose rows say what is sent"
        if self.turns > 1 or self.think_s:
            yield "turns and think_s do not go with trace, whose rows are single requests"
        yield from field_problems(self.request, self.endpoint, natural=self.output is not None and self.output.natural)

    @property
    def window_s(self) -> float | None:
        """How long requests are counted; None where their number decides, or the length of a trace."""
        if self.requests is not None or (self.trace is not None and self.seconds is None):
            return None
        return self.seconds or 60.0

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent when they are due, however many are still under way."""
        return self.concurrency is None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The classes of the mix with what they inherit; without a mix one class that has no name."""
        base = Kind(None, 1.0, self.prompt, self.output, self.turns, self.think_s, self.request, self.adapters)
        total = sum(each.share for each in self.mix)
        kinds: list[Kind] = []
        groups_from = 0
        for each in self.mix:
            kind = Kind(
                name=each.name,
                share=each.share / total,
                prompt=each.prompt or base.prompt,
                output=each.output or base.output,
                turns=base.turns if each.turns is None else each.turns,
                think_s=base.think_s if each.think_s is None else each.think_s,
                request={**base.request, **each.request},
                adapters=base.adapters if each.adapters is None else each.adapters,
                groups_from=groups_from,
            )
            kinds.append(kind)
            groups_from += kind.prompt.groups * max(len(kind.adapters), 1) if kind.prompt else 0
        return tuple(kinds) or (base,)

    @property
    def slo(self) -> dict[str, float]:
        """The limits of the classes, in seconds: "chat.ttft_p99"."""
        return {f"{each.name}.{name}": limit_s for each in self.mix for name, limit_s in each.slo.items()}

    @property
    def longest_tokens(self) -> int | None:
        """The longest prompt with its history, and its answer; None where only a file says."""
        return max((kind.longest_tokens or 0 for kind in self.kinds), default=0) or None

    @property
    def synthetic(self) -> bool:
        """Whether prompts are random tokens; of a trace this is what is usual, its file decides."""
        return self.trace is not None or any(kind.prompt and kind.prompt.tokens for kind in self.kinds)

    @property
    def words(self) -> str:
        """What is sent, in one line for people."""
        if self.trace is not None:
            speed = f" at {self.trace_speed:g} times its speed" if self.trace_speed != 1 else ""
            return f"the requests of a trace{speed}"
        if not self.mix:
            return self.kinds[0].words
        return "; ".join(f"{kind.share:.0%} {kind.name}: {kind.words}" for kind in self.kinds)

    def levels(self) -> tuple[Level, ...]:
        if self.trace is not None:
            return (Level("trace", trace=True),)
        if self.concurrency is not None:
            counts = self.concurrency if isinstance(self.concurrency, list) else [self.concurrency]
            return tuple(Level(f"c={count}", concurrency=count) for count in counts)
        if isinstance(self.rate, Ramp):
            ramp = self.rate
            return (Level(f"r={ramp.from_rps:g}..{ramp.to_rps:g}", rate_rps=ramp.from_rps, to_rps=ramp.to_rps),)
        if self.rate == "max":
            return (Level("r=max", search=True),)
        rates = self.rate if isinstance(self.rate, list) else [self.rate]
        return tuple(Level(f"r={rate:g}", rate_rps=rate) for rate in rates if isinstance(rate, int | float))
