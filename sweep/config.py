"""A search space as a whole: the sections put together, and every error placed in its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import time
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from sweep.errors import ConfigError
from sweep.load.workload import LoadSection
from sweep.measure.warmup import MeasureSection
from sweep.model import Flags
from sweep.search.space import Rule, RuleError, SearchSection, Space
from sweep.section import Section, did_you_mean
from sweep.serve.kind import ServeSection
from sweep.serve.vllm_flags import RULES, changes_answers, parse_command_line, refusal
from sweep.yamlfile import KeyPath, YamlFile, read_value, read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Confirm(Section):
    """How many finalists are measured again in fresh launches."""

    top: int = Field(default=3, ge=1)


class RunSection(Section):
    """How long, and under which name."""

    name: str
    trials: int = Field(default=40, ge=1, le=100_000)
    hours: float | None = Field(default=None, gt=0)
    max_failures_in_a_row: int = Field(default=10, ge=1)
    confirm: Confirm | None = None

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("a study's name is a folder's name: letters, digits, '.', '_' and '-', 64 at most")
        return name


class SweepConfig(Section):
    """Everything that a sweep is told, checked as far as it can be without a launch."""

    serve: ServeSection
    search: SearchSection
    load: LoadSection
    measure: MeasureSection = MeasureSection()
    run: RunSection

    @property
    def baseline(self) -> Flags:
        """The flags of the baseline; a pasted command line is already taken apart."""
        assert isinstance(self.search.baseline, dict)
        return self.search.baseline

    @property
    def space(self) -> Space:
        """The swept flags, with the user's rules and vLLM's own."""
        rules = tuple(Rule.parse(text) for text in (*RULES, *self.search.rules))
        return Space(self.search.params, rules, self.serve.args)

    def flags(self, chosen: Flags) -> Flags:
        """Return all flags of a launch: the fixed ones, and over them what a trial chose."""
        return {**self.serve.args, **chosen}

    def notes(self) -> list[str]:
        """Return what people should know before they start a night, and what is no mistake all the same."""
        alone = [name for name in self.baseline if name not in self.search.params and name not in self.serve.args]
        changed = [name for name in self.baseline if name in self.serve.args]
        notes = self.search.notes()
        if alone:
            notes.append(
                f"search.baseline alone sets {', '.join(alone)}: the other trials have vLLM's own default there."
                " Put a flag into serve.args to have it in all of them."
            )
        if changed:
            notes.append(f"search.baseline sets {', '.join(changed)} otherwise than serve.args: it serves differently.")
        if self.run.confirm is not None:
            notes.append(
                "run.confirm is not available yet: finalists are not measured again, so the closing comparison is a"
                " quick check, not proof."
            )
        return notes

    @model_validator(mode="after")
    def _fits_together(self) -> SweepConfig:
        problems = [*_flag_problems(self), *_rule_problems(self), *_length_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _flag_problems(config: SweepConfig) -> Iterator[str]:
    search = config.search
    for name in search.params:
        if name in config.serve.args:
            yield f"search.params.{name}: also fixed in serve.args; keep one of the two"
        if changes_answers(name) and not search.allow_quality_change:
            yield (
                f"search.params.{name}: changes answers or accepted lengths, not only speed;"
                " set search.allow_quality_change: true to sweep it all the same"
            )
    named = [("search.params", list(search.params)), *((key, list(flags)) for key, flags in _entries(config))]
    for key, names in named:
        for name in names:
            if reason := refusal(name, allow_remote_code=config.serve.allow_remote_code):
                yield f"{key}.{name}: cannot be set here: {reason}"


def _entries(config: SweepConfig) -> list[tuple[str, Flags]]:
    """Return the flag sets that are tried whatever the sampler thinks, each with its key in the file."""
    enqueued = [(f"search.enqueue.{index}", flags) for index, flags in enumerate(config.search.enqueue)]
    return [("search.baseline", config.baseline), *enqueued]


def _rule_problems(config: SweepConfig) -> Iterator[str]:
    known = {*config.search.params, *config.serve.args}
    known.update(*(flags for _, flags in _entries(config)))
    for index, text in enumerate(config.search.rules):
        try:
            Rule.parse(text).check_names(known)
        except RuleError as error:
            yield f"search.rules.{index}: {error}"
    for key, flags in _entries(config):
        if violated := config.space.violated(flags):
            yield f"{key}: breaks the rule {violated!r}"


def _length_problems(config: SweepConfig) -> Iterator[str]:
    longest = config.serve.args.get("max-model-len")
    asked = config.load.prompt.tokens + config.load.output.tokens
    if isinstance(longest, int) and not isinstance(longest, bool) and asked > longest > 0:
        yield (
            f"load: prompt.tokens {config.load.prompt.tokens} + output.tokens {config.load.output.tokens}"
            f" = {asked} is more than serve.args.max-model-len {longest}; raise it or shorten the load"
        )


def load_config(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read and check a search space. overrides: "key.path=value" with a YAML value, as from the command line.

    Raises ConfigError with one line for each problem: file, line, key, and what to do.
    """
    document = read_yaml(path)
    data = _apply(document.data, overrides)
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    _take_baseline_apart(data, document)
    return _validate(data, document)


def config_from_data(data: dict[str, Any], origin: Path) -> SweepConfig:
    """Check a configuration that a study's folder kept."""
    return _validate(data, YamlFile(origin, data, {}))


def _validate(data: dict[str, Any], document: YamlFile) -> SweepConfig:
    try:
        return SweepConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(error, document))) from None


def _describe(error: ValidationError, document: YamlFile) -> Iterator[str]:
    for item in error.errors(include_url=False):
        key = tuple(part for part in item["loc"] if not _is_schema_noise(part, document, item["loc"]))
        message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if not key and item["type"] == "value_error":
            # Problems between sections carry their key at the front of each line.
            for line in message.splitlines():
                dotted = line.partition(":")[0]
                yield f"{document.where(_split(dotted))}: {line}"
            continue
        dotted = ".".join(str(part) for part in key)
        if item["type"] == "extra_forbidden":
            known = _known_keys(key[:-1])
            message = f"unknown key{did_you_mean(str(key[-1]), known)}; known here: {', '.join(known)}"
        elif item["type"] == "missing":
            message = "is missing"
        if message[1:2].islower():  # pydantic's own sentences; a name such as HF_TOKEN keeps its spelling
            message = message[:1].lower() + message[1:]
        yield f"{document.where(key)}: {dotted}: {message}"


def _is_schema_noise(part: str | int, document: YamlFile, location: tuple[str | int, ...]) -> bool:
    """Tell whether pydantic put this part into a location itself (the name of a union's member, for instance)."""
    if isinstance(part, int):
        return False
    if location and location[-1] == part:
        known = {key[-1] for key in document.lines if key}
        return part not in known and not part.replace("-", "_").isidentifier()
    return bool(re.search(r"[\[\](){}]", part)) or part in {"bool", "int", "float", "str", "list", "dict"}


def _known_keys(key: KeyPath) -> list[str]:
    fields: Any = SweepConfig
    for part in key:
        annotation = fields.model_fields[part].annotation if part in getattr(fields, "model_fields", {}) else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        fields = next((c for c in candidates if hasattr(c, "model_fields")), None)
        if fields is None:
            return []
    return list(fields.model_fields)


def _split(dotted: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {override}: expected key=value, such as run.trials=20")
        value = read_value(text, f"--set {override}")
        *parents, last = dotted.split(".")
        place = data
        for part in parents:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: {part!r} is not a mapping")
        place[last] = value
    return data


def _take_baseline_apart(data: dict[str, Any], document: YamlFile) -> None:
    """Replace a pasted `vllm serve …` line by its flags; the model it names must be the one that is swept."""
    search = data.get("search")
    if not isinstance(search, dict) or not isinstance(search.get("baseline"), str):
        return
    where = document.where(("search", "baseline"))
    try:
        line = parse_command_line(search["baseline"])
    except ValueError as error:
        raise ConfigError(f"{where}: search.baseline: {error}") from None
    serve = data.get("serve")
    swept = serve.get("model") if isinstance(serve, dict) else None
    if line.model is not None and line.model != swept:
        raise ConfigError(f"{where}: search.baseline: serves {line.model!r}, but serve.model is {swept!r}")
    search["baseline"] = line.flags


def parse_until(text: str) -> time:
    """Parse the clock time of `--until`, "HH:MM"."""
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)
    if not match:
        raise ConfigError(f"--until {text}: expected a time of day such as 07:00")
    return time(int(match[1]), int(match[2]))
