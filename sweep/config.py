"""A search space as a whole: the sections put together, and every error placed in its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import time
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from sweep.errors import ConfigError
from sweep.load.plan import Plan
from sweep.load.workload import LoadSection
from sweep.measure.warmup import MeasureSection
from sweep.memory.section import MemorySection
from sweep.model import Flags
from sweep.search.objectives import Objective
from sweep.search.space import Rule, RuleError, SearchSection, Space
from sweep.section import Section, did_you_mean
from sweep.serve.command_line import parse_command_line
from sweep.serve.kind import ServeSection
from sweep.serve.vllm_flags import RULES, changes_answers, refusal
from sweep.yamlfile import KeyPath, YamlFile, dotted_key, read_value, read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SPECULATIVE = frozenset(
    {"speculative-config", "spec-method", "spec-model", "spec-tokens", "speculative-model", "num-speculative-tokens"}
)


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
    memory: MemorySection = MemorySection()
    run: RunSection
    _document: YamlFile | None = PrivateAttr(default=None)

    @property
    def baseline(self) -> Flags:
        """The flags of the baseline; a pasted command line is already taken apart."""
        assert isinstance(self.search.baseline, dict)
        return self.search.baseline

    @property
    def objective(self) -> Objective:
        """The objective, with the limits of the classes of the load beside its own."""
        return self.search.objective.with_limits(self.load.slo)

    @property
    def space(self) -> Space:
        """The swept flags, with the user's rules and vLLM's own."""
        rules = tuple(Rule.parse(text) for text in (*RULES, *self.search.rules))
        return Space(self.search.params, rules, self.serve.args)

    def flags(self, chosen: Flags) -> Flags:
        """Return all flags of a launch: the fixed ones, and over them what a trial chose."""
        return {**self.serve.args, **chosen}

    def place(self, key: KeyPath) -> str:
        """Return "file:line: key", as messages about a key begin; the key alone where no file was read."""
        return f"{self._document.where(key)}: {dotted_key(key)}" if self._document else dotted_key(key)

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
        if "enable-prefix-caching" in self.search.params and not _shares(self.load):
            notes.append(
                "search.params.enable-prefix-caching: no two prompts of this load begin alike, so a prefix cache cannot"
                " help; give load.prompt.shared_prefix or turns if yours do."
            )
        if self.run.confirm is not None:
            notes.append(
                "run.confirm is not available yet: finalists are not measured again, so the closing comparison is a"
                " quick check, not proof."
            )
        return notes

    @model_validator(mode="after")
    def _fits_together(self) -> SweepConfig:
        problems = [*_flag_problems(self), *_rule_problems(self), *_length_problems(self), *_load_problems(self)]
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


def _shares(load: LoadSection) -> bool:
    """Tell whether requests may begin alike; what is in a file is for the file to say."""
    return any(
        kind.prompt is None or kind.prompt.file is not None or kind.prompt.shared_prefix > 0 or kind.turns > 1
        for kind in load.kinds
    )


def _max_model_len(config: SweepConfig) -> int | None:
    limit = config.serve.args.get("max-model-len")
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


def _length_problems(config: SweepConfig) -> Iterator[str]:
    limit, longest = _max_model_len(config), config.load.longest_tokens
    if limit is not None and longest is not None and longest > limit:
        yield (
            f"load: its longest request has {longest} tokens with its history and its answer, more than"
            f" serve.args.max-model-len {limit}; raise that, or shorten the load (of a distribution: its max)"
        )


def _load_problems(config: SweepConfig) -> Iterator[str]:
    load, objective = config.load, config.objective
    levels = load.levels()
    if levels[0].search and not objective.slo:
        yield (
            "load.rate: max is the highest rate under SLOs; add them to search.objective, such as"
            " slo: {ttft_p99: 500ms}, or to a class of load.mix"
        )
    if objective.maximize == "rate_rps" and not (levels[0].search or sum(bool(each.rate_rps) for each in levels) > 1):
        yield "search.objective: rate_rps compares rates; set load.rate: max, or a list of rates"
    if problem := objective.problem():
        yield f"search.objective: {problem}"
    yield from _adapter_problems(config)
    if load.trace is None and load.synthetic:
        yield from _speculation_problems(config, "load.prompt")


def _adapter_problems(config: SweepConfig) -> Iterator[str]:
    adapters = {adapter for kind in config.load.kinds for adapter in kind.adapters}
    modules = config.serve.args.get("lora-modules")
    if not adapters:
        return
    if config.serve.args.get("enable-lora") is not True or not modules:
        yield (
            "load.adapters: the server has none; set enable-lora: true and lora-modules: [name=path, …] in serve.args"
        )
        return
    served = {_adapter_name(module) for module in (modules if isinstance(modules, list) else [modules])}
    if missing := sorted(adapters - served):
        yield f"load.adapters: {', '.join(missing)} is not among serve.args.lora-modules: {', '.join(sorted(served))}"


def _adapter_name(module: object) -> str:
    return str(module.get("name")) if isinstance(module, dict) else str(module).partition("=")[0]


def _speculation_problems(config: SweepConfig, key: str) -> Iterator[str]:
    """How many drafted tokens are accepted is a matter of what is written: of random tokens it says nothing."""
    flags = {name for _, entry in _entries(config) for name, value in entry.items() if value is not None}
    flags |= {name for name, value in config.serve.args.items() if value is not None}
    flags |= set(config.search.params)
    used = sorted(name for name in flags if name.partition(".")[0] in _SPECULATIVE)
    if used:
        yield (
            f"{key}: random tokens say nothing of speculative decoding ({', '.join(used)}), which nobody can draft;"
            " take recorded prompts: load.prompt.file, with a natural output"
        )


def load_config(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read and check a search space. overrides: "key.path=value" with a YAML value, as from the command line.

    Raises ConfigError with one line for each problem: file, line, key, and what to do. Files of prompts are read, too:
    a night must not begin with one that cannot be used.
    """
    document = read_yaml(path)
    data = _apply(document.data, overrides)
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    _take_baseline_apart(data, document)
    files = dict(_place_files(data.get("load"), document, ("load",)))
    config = _validate(data, document)
    if files:
        _check_files(config, document, files)
    return config


def config_from_data(data: dict[str, Any], origin: Path) -> SweepConfig:
    """Check a configuration that a study's folder kept."""
    return _validate(data, YamlFile(origin, data, {}))


def _place_files(load: Any, document: YamlFile, key: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Make the names of files absolute, so that a study finds them wherever it is resumed. Yield each with its key."""
    if not isinstance(load, dict):
        return
    classes = load.get("mix")
    for index, each in enumerate(classes if isinstance(classes, list) else []):
        yield from _place_files(each, document, (*key, "mix", index))
    for holder, name, place in (
        (load, "trace", (*key, "trace")),
        (load.get("prompt"), "file", (*key, "prompt", "file")),
    ):
        if isinstance(holder, dict) and isinstance(holder.get(name), str):
            try:
                holder[name] = str(document.path.absolute().parent / Path(holder[name]).expanduser())
            except RuntimeError:
                raise ConfigError(
                    f"{document.where(place)}: {dotted_key(place)}: {holder[name]}: no such user; write the path out"
                ) from None
            yield holder[name], place


def _check_files(config: SweepConfig, document: YamlFile, files: Mapping[str, KeyPath]) -> None:
    try:
        plan = Plan(config.load, config.search.seed)
    except ConfigError as error:
        key = _key_of(str(error), files)
        raise ConfigError(f"{document.where(key)}: {dotted_key(key)}: {error}") from None
    limit = _max_model_len(config)
    if limit is not None and (rows := plan.too_long(limit)):
        key = _key_of(rows[0], files)
        raise ConfigError(
            f"{document.where(key)}: {dotted_key(key)}: {len(rows):,} rows need more than serve.args.max-model-len"
            f" {limit}, the first is {rows[0]}; raise that, or leave them out of the file"
        )
    if plan.synthetic:
        key = next(iter(files.values()))
        for problem in _speculation_problems(config, dotted_key(key)):
            raise ConfigError(f"{document.where(key)}: {problem}")


def _key_of(place: str, files: Mapping[str, KeyPath]) -> KeyPath:
    return next((key for path, key in files.items() if place.startswith((f"{path}:", f"{path},"))), ("load",))


def _validate(data: dict[str, Any], document: YamlFile) -> SweepConfig:
    try:
        config = SweepConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(error, document))) from None
    config._document = replace(document, data={})  # noqa: SLF001 - only the places are needed
    return config


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
        dotted = dotted_key(key)
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
    fields: type[BaseModel] | None = SweepConfig
    for part in key:
        if isinstance(part, int):
            continue  # an entry of a list has the keys of its section
        field = fields.model_fields.get(part) if fields else None
        fields = next(_sections(field.annotation), None) if field else None
    return [field.alias or name for name, field in fields.model_fields.items()] if fields else []


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type is made of, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


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
