"""What can be known before the first launch: whether the installed vLLM takes the flags, and what it makes of them."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from sweep.config import SweepConfig
from sweep.errors import ConfigError, MachineError
from sweep.failure import Failure
from sweep.load.stamps import allow_open_files
from sweep.model import Flags, FlagValue
from sweep.run import beside, value_check
from sweep.run.doctor_checks import check_command
from sweep.run.doctor_facts import serving
from sweep.run.doctor_model import find_model, hub_cache
from sweep.run.flag_check import flag_problems
from sweep.run.value_check import ValueCheck
from sweep.search.space import Rule
from sweep.serve.failures import classify
from sweep.serve.flag_catalogue import Catalogue, kept_catalogue, read_catalogue
from sweep.serve.parser_check import Comparison, ParsedConfig, compare_configs
from sweep.serve.vllm_flags import to_config
from sweep.yamlfile import KeyPath

_BASELINE = "search.baseline"
_OF_MODEL = frozenset({"model_not_found", "auth_gated_model", "trust_remote_code_needed"})
_OFFLINE = re.compile(r"outgoing traffic has been disabled|OfflineModeIsEnabled|offline mode", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"LocalEntryNotFoundError|couldn't connect|HTTPSConnectionPool|Read timed out|ReadTimeoutError|Too Many Requests"
    r"|\b(?:429 Client|50\d Server) Error|Max retries exceeded"
)


@dataclass(frozen=True, slots=True)
class Preflight:
    """resolved: the baseline's values of all flags as the engine would use them, as far as they could be had.

    moe: whether the model is a mixture of experts; None where that could not be had. platform: "cpu", "cuda", "rocm", …
    as vLLM sees it. rules: what this platform asks of the flags, beside the rules of every space. alone: of each swept
    flag what vLLM makes of its values, of many the chosen ones. catalogue: the flags that this vLLM has.
    """

    vllm_version: str | None
    resolved: Flags = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    moe: bool | None = None
    platform: str | None = None
    rules: tuple[str, ...] = ()
    alone: dict[str, tuple[ValueCheck, ...]] = field(default_factory=dict)
    catalogue: Catalogue | None = None

    def refused(self, flags: Flags) -> str | None:
        """Return why no launch with these flags can succeed, if one flag by itself is the reason."""
        return value_check.refused(self.alone, flags)

    def same_config(self, flag: str) -> tuple[tuple[FlagValue, ...], ...]:
        """Group a flag's values by the engine's configuration with the baseline's other flags.

        A value unlike all others is a group of its own; of a value that stands in no group nothing is known.
        """
        return value_check.same_config(self.alone.get(flag, ()))


def config_file(config: SweepConfig, chosen: Flags) -> dict[str, object]:
    """Return the content of the YAML file that vLLM is started with for a trial."""
    return to_config(config.serve.model, config.serve.revision, config.flags(chosen))


async def preflight(config: SweepConfig) -> Preflight:
    """Let the vLLM that will serve read the flags: all names and types, what is sure to be used, and each swept value.

    Raises ConfigError for flags that it refuses, MachineError where there is no vLLM or no model.
    """
    for level in config.load.levels():
        allow_open_files(level.concurrency)
    catalogue = await read_catalogue(config.serve)
    if catalogue is not None and catalogue.kept and flag_problems(config, catalogue):
        # What was kept may be older than a plugin that adds flags: no refusal rests on it.
        catalogue = await read_catalogue(config.serve, anew=True) or catalogue
    _refuse_unknown(config, catalogue)
    entries = {"serve.args": {}, _BASELINE: config.baseline}
    entries |= {f"search.enqueue.{i}": flags for i, flags in enumerate(config.search.enqueue)}
    alone = {
        value_check.key_of(name, number): {**config.baseline, name: value}
        for name, values in value_check.values_to_ask(config).items()
        for number, value in enumerate(values)
    }
    asked = await _ask(config, entries | alone, compared=tuple(alone))
    fixed, baseline = asked.compared["serve.args"], asked.compared[_BASELINE]
    if fixed.unchecked:
        note = f"The flags could not be checked before the launch: {fixed.unchecked}"
        return Preflight(fixed.vllm_version, notes=(note,), catalogue=catalogue)
    _refuse(config, {key: asked.compared[key] for key in entries}, entries, named=catalogue is not None)
    told = config.flags(config.baseline)
    rules = value_check.platform_rules(baseline.platform, baseline.resolved or {}, told)
    _refuse_broken(config, entries, rules, baseline.platform)
    known = [spec.name for spec in catalogue.flags] if catalogue else []
    checks = value_check.check_values(config, asked, baseline.platform, baseline, known)
    if further := beside.questions(config, checks):
        again = await _ask(config, {_BASELINE: config.baseline, **further}, compared=tuple(further))
        answers = again.compared
    else:
        answers = {}
    checks = beside.confirmed(config, checks, answers)
    value_check.refuse_hopeless(config, checks)
    return Preflight(
        fixed.vllm_version,
        dict(baseline.resolved or {}),
        (*await _program_notes(config), *value_check.refusal_notes(checks)),
        moe=baseline.moe,
        platform=baseline.platform,
        rules=rules,
        alone=checks,
        catalogue=catalogue,
    )


async def known_before(config: SweepConfig) -> Preflight:
    """Check the flags' names and types without a start of vLLM, if an earlier check has kept its flags.

    Raises ConfigError for flags that it has not.
    """
    try:
        catalogue = await kept_catalogue(config.serve)
    except MachineError as fault:
        return Preflight(None, notes=(f"The flags were not checked: {fault}",))
    _refuse_unknown(config, catalogue)
    note = "The flags were not checked: what this vLLM has is read by a check without --offline, and kept."
    return Preflight(None, notes=() if catalogue else (note,), catalogue=catalogue)


async def _program_notes(config: SweepConfig) -> list[str]:
    """Return what is wrong with the program itself, which its parser does not tell."""
    found = await asyncio.to_thread(serving, config.serve.command, config.serve.env, given=True)
    return [f"serve.command: {line.seen}. {line.remedy}" for line in check_command(found) if line.status != "ok"]


def _refuse_unknown(config: SweepConfig, catalogue: Catalogue | None) -> None:
    if catalogue is not None and (problems := flag_problems(config, catalogue)):
        raise ConfigError("\n".join(problems))


async def parse(config: SweepConfig, entries: Mapping[str, Flags]) -> dict[str, ParsedConfig]:
    return (await _ask(config, entries)).compared


async def _ask(config: SweepConfig, entries: Mapping[str, Flags], compared: Sequence[str] = ()) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="vllm-sweep-") as folder:
        paths = {}
        for number, (key, chosen) in enumerate(entries.items()):
            paths[key] = Path(folder) / f"{number}.yaml"
            paths[key].write_text(yaml.safe_dump(config_file(config, chosen)), encoding="utf-8")
        base = _BASELINE if compared else None
        return await compare_configs(config.serve, paths, base=base, compared=compared)


def _refuse(
    config: SweepConfig, parsed: Mapping[str, ParsedConfig], entries: Mapping[str, Flags], *, named: bool
) -> None:
    """Raise for everything in these entries that vLLM refuses, each with its place.

    named: whether the flags' names and values have been found to be right.
    """
    failures: dict[str, tuple[Failure, str]] = {}
    for key, result in parsed.items():
        if not result.error:
            continue
        failure = classify(result.error, exit_code=2, phase="start", swept=(), fixed=tuple(config.serve.args))
        # Memory is for the launch to find out, and a baseline without room is replaced. What the fixed flags cause, the
        # others suffer as well; it is told once.
        if not failure.kind.startswith("oom_") and failure.evidence not in failures:
            place = config.place(_key(key, failure, config.flags(entries[key])))
            failures[failure.evidence] = failure, _reason(config, failure, place, named=named)
    if failures:
        text = "\n".join(dict.fromkeys(told for _, told in failures.values()))
        mendable = all(failure.kind in {"invalid_argument", "unsupported_feature"} for failure, _ in failures.values())
        raise ConfigError(text) if mendable else MachineError(text)


def _reason(config: SweepConfig, failure: Failure, place: str, *, named: bool) -> str:
    """Say why vLLM took no flags at all, or refused these, and what to do."""
    model = config.place(("serve", "model"))
    why = _out_of_reach(failure)
    if why is not None:
        offline = (
            " The names and values of the flags are right as far as they can be told without it; "
            "`check --offline` goes by that much."
        )
        return (
            f"{model}: the model's configuration could not be had: {why}. Download the model beforehand "
            f"(`hf download`), or name a folder that holds it.{offline if named else ''}"
        )
    if failure.kind == "other" and (damage := _damage(config)):
        return f"{model}: {damage}. Download the model again, or correct serve.model."
    return f"{place}: vLLM refuses this: {failure.evidence}\n{failure.advice}"


def _out_of_reach(failure: Failure) -> str | None:
    """Return why the hub did not answer; None where it did, or where that is not the matter."""
    if failure.kind != "model_not_found":
        return None
    if _OFFLINE.search(failure.evidence):
        return "it is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub"
    return "it is not on this machine, and the hub cannot be reached" if _UNREACHABLE.search(failure.evidence) else None


def _damage(config: SweepConfig) -> str | None:
    """Return what is wrong with the files of a model that is on this machine."""
    env = {**os.environ, **config.serve.env, "HF_HUB_OFFLINE": "1"}  # the hub is not asked
    folder = config.serve.args.get("download-dir")
    cache = Path(folder) if isinstance(folder, str) else hub_cache(env)
    return find_model(config.serve.model, config.serve.revision, env, cache).damage


def _refuse_broken(
    config: SweepConfig, entries: Mapping[str, Flags], rules: Sequence[str], platform: str | None
) -> None:
    """Raise for what is sure to be launched and breaks a rule of this platform, which vLLM finds late in a start."""
    named = {**entries, "serve.args": config.serve.args}
    problems = {
        f"{config.place((*_parts(entry), name))}: breaks the rule {text!r}, which vLLM has on the platform {platform}"
        for entry, flags in named.items()
        for text in rules
        for name in Rule.parse(text).names
        if name in flags and not Rule.parse(text).allows(config.flags(flags))
    }
    if problems:
        raise ConfigError("\n".join(sorted(problems)))


def _parts(entry: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in entry.split("."))


def _key(entry: str, failure: Failure, flags: Flags) -> KeyPath:
    """Return the key that is to be mended: of the one flag that the message names, else of the entry."""
    parts = _parts(entry)
    named = [name for name in flags if name.replace("-", "_") in failure.evidence.replace("-", "_")]
    if failure.kind in _OF_MODEL or (not named and failure.evidence.startswith("Model architecture")):
        return ("serve", "model")
    return (*parts, named[0]) if len(named) == 1 else parts
