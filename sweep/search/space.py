"""What may be tried: the `search:` section, the values of every swept flag, and the space that they span."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema, field_validator

from sweep.model import Flags, FlagValue
from sweep.search.objectives import Objective
from sweep.search.rules import Rule, RuleError, flag_name
from sweep.section import Section, did_you_mean

__all__ = ["Param", "Rule", "RuleError", "SearchSection", "Space", "flag_name"]

SamplerName: TypeAlias = Literal["auto", "tpe", "gp", "random"]
Number: TypeAlias = int | float

_RANGE_KEYS = ("low", "high", "step", "log")
# A range of fractions without a step is cut into this many equal parts: finer than what a measurement can tell apart.
_PARTS = 100
_MAX_FRACTIONS = 1000
_LIMIT = 10**18  # of a number; beyond, fractions and whole numbers cannot be told apart
_NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_SCIENTIFIC = re.compile(_NUMERAL.pattern + r"[eE][+-]?\d+")
_PERCENT = re.compile(_NUMERAL.pattern + r"\s*%")
_FORMS = "write a list of values, or {low, high, step}; a flag with one value belongs in serve.args"


@dataclass(frozen=True, slots=True)
class Param:
    """The values that a swept flag may take; a point of the space names each by its index.

    form: as the YAML file has it. ordered: neighbours are alike, so a sampler may treat the index as a number.
    note: what people should know about the values, such as a step that does not reach the upper end.
    """

    form: list[Any] | dict[str, Any]
    grid: Sequence[FlagValue] = field(repr=False)
    ordered: bool
    note: str | None = None

    @property
    def size(self) -> int:
        return len(self.grid)

    def values(self) -> Sequence[FlagValue]:
        return self.grid

    def index(self, value: FlagValue) -> int | None:
        """Return where a value stands, or None. 16 and 16.0 are the same value, true and 1 are not."""
        if isinstance(self.grid, range):  # it may be long, and finds a whole number without a search
            whole = _whole(value)
            return self.grid.index(whole) if whole is not None and whole in self.grid else None
        wanted = _canonical(value)
        return next((i for i, known in enumerate(self.grid) if _canonical(known) == wanted), None)

    def contains(self, value: FlagValue) -> bool:
        return self.index(value) is not None


def read_param(form: Any) -> Param:
    """Read the values of a flag from a list, `{choices: […]}`, or `{low, high, step, log}`; raises ValueError."""
    match form:
        case Param():
            return form
        case list():
            return _read_choices(form, form)
        case {"choices": list() as choices, **rest} if not rest:
            return _read_choices(form, choices)
        case {"choices": list(), **rest}:
            raise ValueError(f"choices stand alone; remove {', '.join(map(str, rest))}")
        case {"low": _, "high": _}:
            return _read_range(form)
        case dict():
            _refuse_unknown_keys(form)
            missing = "low" if "low" not in form else "high"
            raise ValueError(f"{missing} is missing: {_FORMS}")
    raise ValueError(f"{form!r} is neither a list nor a mapping: {_FORMS}")


def _refuse_unknown_keys(form: Mapping[Any, Any]) -> None:
    for key in form:
        if key not in _RANGE_KEYS:
            raise ValueError(f"unknown key {key!r}{did_you_mean(str(key), (*_RANGE_KEYS, 'choices'))}; {_FORMS}")


def _read_choices(form: list[Any] | dict[str, Any], raw: list[Any]) -> Param:
    if not raw:
        raise ValueError(f"the list is empty: {_FORMS}")
    choices = [_read_choice(value) for value in raw]
    names = [_canonical(choice) for choice in choices]
    for choice, name in zip(choices, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"{_shown(choice)} stands in the list twice")
    numeric = [choice for choice in choices if _is_number(choice)]
    all_numeric = len(numeric) == len(choices)
    grid = tuple(sorted(numeric)) if all_numeric else tuple(choices)
    # Between two values there is nothing to skip, so they have an order whatever they are.
    return Param(form, grid, ordered=all_numeric or len(grid) <= 2, note=_constant_note(grid))


def _read_choice(raw: Any) -> FlagValue:
    if raw is None:
        raise ValueError("null is no value; to try vLLM's own default, write what it is")
    if isinstance(raw, str):
        text = raw.strip()
        if text.lower() in {"true", "false"}:
            raise ValueError(f"{raw!r} in quotes is text; write {text.lower()} without quotes")
        # Other text stays text, even "16": whoever puts a number in quotes means text.
        return read_number(text) if _SCIENTIFIC.fullmatch(text) or _PERCENT.fullmatch(text) else raw
    if _is_number(raw):
        return read_number(raw)
    try:
        json.dumps(raw, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"{_shown(raw)} is nothing that a flag can be set to; put text in quotes") from None
    return raw  # type: ignore[no-any-return]  # JSON: a bool, a list or a mapping


def read_number(raw: object) -> Number:
    """Read a finite number, also one that YAML reads as text (1e-3); raises ValueError."""
    value = raw
    if isinstance(raw, str):
        text = raw.strip()
        if _PERCENT.fullmatch(text):
            raise ValueError(f"{raw!r} is not a number; write {float(text[:-1]) / 100:.4g}")
        if not _NUMERAL.fullmatch(text) and not _SCIENTIFIC.fullmatch(text):
            raise ValueError(f"{raw!r} is not a number")
        value = float(text)
        if value.is_integer() and "." not in text:
            value = int(value)
    if not _is_number(value):
        raise ValueError(f"{_shown(raw)} is not a number")
    if not -_LIMIT < value < _LIMIT:  # false for nan too
        raise ValueError(f"{_shown(raw)} is not a number below 1e18")
    return value


def _read_range(form: dict[str, Any]) -> Param:
    _refuse_unknown_keys(form)
    low, high = _named_number(form, "low"), _named_number(form, "high")
    step, log = form.get("step"), form.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"log is true or false, not {_shown(log)}")  # noqa: TRY004 - for pydantic
    if low > high:
        raise ValueError(f"low {low} is above high {high}; swap them")
    if step == "pow2":
        return _param_of(form, _powers(low, high), high)
    if step is not None:
        step = _named_number(form, "step")
        if step <= 0:
            raise ValueError(f"step {step} must be above 0")
        if log:
            raise ValueError("log: true has no number as its step; remove one of the two, or write step: pow2")
    if log:
        return _param_of(form, _geometric(low, high), high)
    if all(isinstance(number, int) for number in (low, high, step or 1)):
        return _param_of(form, range(int(low), int(high) + 1, int(step or 1)), high)
    return _param_of(form, _fractions(low, high, step), high)


def _named_number(form: Mapping[str, Any], key: str) -> Number:
    try:
        return read_number(form[key])
    except ValueError as error:
        hint = ", or pow2" if key == "step" else ""
        raise ValueError(f"{key}: {error}{hint}") from None


def _param_of(form: dict[str, Any], grid: Sequence[Number], high: Number) -> Param:
    note = _constant_note(grid)
    if grid[-1] < high and note is None:
        note = f"step {form.get('step')} does not end at high {high}: the largest value tried is {grid[-1]}"
    return Param(form, grid, ordered=True, note=note)


def _powers(low: Number, high: Number) -> tuple[int, ...]:
    for key, value in (("low", low), ("high", high)):
        if value < 1 or value != int(value) or int(value).bit_count() != 1:
            below = 2 ** math.floor(math.log2(max(value, 1)))
            raise ValueError(f"{key} {value} is no power of two, as step: pow2 needs; write {below} or {2 * below}")
    return tuple(1 << exponent for exponent in range(int(low).bit_length() - 1, int(high).bit_length()))


def _geometric(low: Number, high: Number) -> tuple[Number, ...]:
    if low <= 0:
        raise ValueError(f"low {low} must be above 0 with log: true")
    whole = isinstance(low, int) and isinstance(high, int)
    ratio = high / low
    inner = [low * ratio ** (part / _PARTS) for part in range(1, _PARTS)]
    rounded = [round(value) if whole else float(f"{value:.4g}") for value in inner]
    return tuple(sorted({low, *(value for value in rounded if low < value < high), high}))


def _fractions(low: Number, high: Number, step: Number | None) -> tuple[float, ...]:
    """Decimal sums: with binary ones, 0.80 and three steps of 0.01 are 0.8300000000000001."""
    start, end = Decimal(str(low)), Decimal(str(high))
    width = Decimal(str(step)) if step is not None else (end - start) / _PARTS
    count = int((end - start) / width) + 1 if width else 1
    if count > _MAX_FRACTIONS:
        raise ValueError(f"step {step} makes {count} values; {_MAX_FRACTIONS} at most, so take a larger step")
    return tuple(float(start + part * width) for part in range(count))


def _constant_note(grid: Sequence[FlagValue]) -> str | None:
    return f"has the one value {_shown(grid[0])}, so nothing is searched" if len(grid) == 1 else None


def _is_number(value: object) -> TypeGuard[Number]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> int | None:
    return int(value) if _is_number(value) and math.isfinite(value) and value == int(value) else None


def _canonical(value: object) -> str:
    """Return a text that is equal for equal values."""
    return repr(float(value)) if _is_number(value) else json.dumps(value, sort_keys=True)


def _shown(value: object) -> str:
    """Write a value as YAML would have it."""
    return json.dumps(value, default=str)


def _normalised(flags: object) -> dict[str, Any]:
    if not isinstance(flags, dict):
        raise ValueError(f"{flags!r} is not a mapping of flags to values")  # noqa: TRY004 - for pydantic
    renamed: dict[str, Any] = {}
    for raw, value in flags.items():
        name = flag_name(raw)
        if name in renamed:
            raise ValueError(f"{name} is given twice: dashes and underscores mean the same flag")
        renamed[name] = value
    return renamed


_PARAM_SCHEMA = {
    "anyOf": [
        {"type": "array", "minItems": 1},
        {
            "type": "object",
            "properties": {
                "low": {"type": "number"},
                "high": {"type": "number"},
                "step": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "pow2"}]},
                "log": {"type": "boolean", "default": False},
            },
            "required": ["low", "high"],
            "additionalProperties": False,
        },
        {"type": "object", "properties": {"choices": {"type": "array", "minItems": 1}}, "required": ["choices"]},
    ]
}
_ParamField = Annotated[
    Param,
    PlainValidator(read_param),
    PlainSerializer(lambda param: param.form, return_type=Any),
    WithJsonSchema(_PARAM_SCHEMA),
]
_FlagsField = Annotated[dict[str, Any], BeforeValidator(_normalised)]


class SearchSection(Section):
    """What to try, and what makes one configuration better than another."""

    objective: Objective = Field(default=Objective(maximize="output_tps"), description="what makes a trial good")
    baseline: _FlagsField | str = Field(default={}, description="flags, or a pasted `vllm serve …` line")
    enqueue: tuple[_FlagsField, ...] = Field(default=(), description="tried early, whatever the sampler thinks")
    sampler: SamplerName = Field(default="auto", description="auto: gp where scipy and torch are installed, else tpe")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of the search; the same seed proposes the same flags")
    rules: tuple[str, ...] = Field(default=(), description="conditions on flags, beside those known of vLLM")
    params: dict[str, _ParamField] = Field(min_length=1, description="any vLLM flag, with the values to try")
    allow_quality_change: bool = Field(default=False, description="allow flags in params that change answers")

    @field_validator("params", mode="before")
    @classmethod
    def _name_params(cls, params: object) -> dict[str, Any]:
        if not params:
            raise ValueError("is empty; name at least one flag and the values to try")
        return _normalised(params)

    @field_validator("rules")
    @classmethod
    def _read_rules(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for text in rules:
            Rule.parse(text)
        return rules

    def notes(self) -> list[str]:
        """Return what people should know about the values before they start a night."""
        return [f"search.params.{name} {param.note}" for name, param in self.params.items() if param.note]


@dataclass(frozen=True, slots=True)
class Space:
    """All combinations of the swept flags' values, and the rules that forbid some of them.

    fixed: the flags of every launch that are not swept; rules may speak of them.
    """

    params: Mapping[str, Param]
    rules: tuple[Rule, ...] = ()
    fixed: Flags = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of combinations, forbidden ones too."""
        return math.prod(param.size for param in self.params.values())

    def with_rules(self, texts: Iterable[str]) -> Space:
        """Return the same space with more rules."""
        return replace(self, rules=(*self.rules, *map(Rule.parse, texts)))

    def violated(self, flags: Flags) -> str | None:
        """Return the first rule that these flags break."""
        together = {**self.fixed, **flags}
        return next((rule.text for rule in self.rules if not rule.allows(together)), None)

    def point(self, flags: Flags) -> tuple[int, ...] | None:
        """Return the index of each flag's value, in the order of `params`; None if the flags are no point of it."""
        if flags.keys() != self.params.keys():
            return None
        indices = [param.index(flags[name]) for name, param in self.params.items()]
        return None if None in indices else tuple(index for index in indices if index is not None)

    def flags(self, point: Sequence[int]) -> Flags:
        return {name: param.values()[index] for (name, param), index in zip(self.params.items(), point, strict=True)}

    def contains(self, flags: Flags) -> bool:
        """Tell whether these flags are one of the combinations, be it a forbidden one."""
        return self.point(flags) is not None
