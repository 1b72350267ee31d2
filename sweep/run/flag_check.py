"""The names and values of a search space's flags against the catalogue of the installed vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sweep.config import SweepConfig, load_config
from sweep.errors import ConfigError, SweepError
from sweep.model import FlagValue
from sweep.search.space import Param, flag_name, read_param
from sweep.serve.flag_catalogue import Catalogue, kept_catalogue
from sweep.serve.kind import ServeSection
from sweep.serve.vllm_flags import normalise_flags
from sweep.yamlfile import KeyPath, YamlFile, dotted_key, read_yaml

# A place where a flag is named, with the values that it has there; of a swept flag also the form that they come from.
_Named = tuple[KeyPath, Iterable[FlagValue], Any]


def load_space(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read and check a search space as `load_config` does.

    Where it cannot be used, ConfigError tells of flags that this vLLM has not, too, if they have been read before: a
    file is mended in one go.
    """
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_problems_of_file(path)])) from None


def _problems_of_file(path: Path) -> list[str]:
    """Return what is wrong with the flags of a file that is not valid as a whole; nothing where that cannot be told."""
    try:
        document = read_yaml(path)
        serve = document.data.get("serve")
        told = {key: serve[key] for key in ("command", "env") if key in serve} if isinstance(serve, dict) else {}
        catalogue = asyncio.run(kept_catalogue(ServeSection.model_validate({"model": "any", **told})))
    except (SweepError, ValidationError):
        return []
    if catalogue is None:
        return []
    return _told(
        _problems(_named_in_file(document), catalogue), lambda key: f"{document.where(key)}: {dotted_key(key)}"
    )


def flag_problems(config: SweepConfig, catalogue: Catalogue) -> list[str]:
    """Return what is wrong with any flag that is named anywhere: file, line, key, and how to mend it, one line each."""
    return _told(_problems(_named(config), catalogue), config.place)


def _told(problems: Iterable[tuple[KeyPath, str]], place: Callable[[KeyPath], str]) -> list[str]:
    return [f"{place(key)}: {problem}" for key, problem in problems]


def _problems(named: Iterable[_Named], catalogue: Catalogue) -> Iterator[tuple[KeyPath, str]]:
    for key, values, form in named:
        name = str(key[-1])
        if problem := catalogue.name_problem(name):
            yield key, problem
            continue
        # Of many values that are no number, one says it all.
        for value in values:
            if problem := catalogue.value_problem(name, value):
                yield (*key, *_entry(form, value)), problem
                break


def _entry(form: Any, value: FlagValue) -> tuple[int, ...]:
    """Return where a value stands in the list that it comes from; 1 and true are not the same."""
    alike = (i for i, raw in enumerate(form if isinstance(form, list) else ()) if type(raw) is type(value))
    return next(((i,) for i in alike if form[i] == value), ())


def _named(config: SweepConfig) -> Iterator[_Named]:
    for name, value in config.serve.args.items():
        yield ("serve", "args", name), (value,), None
    for name, value in config.baseline.items():
        yield ("search", "baseline", name), (value,), None
    for index, flags in enumerate(config.search.enqueue):
        for name, value in flags.items():
            yield ("search", "enqueue", index, name), (value,), None
    for name, param in config.search.params.items():
        yield ("search", "params", name), _telling(param), param.form


def _named_in_file(document: YamlFile) -> Iterator[_Named]:
    """Yield the same of what a file says, as far as it can be read; the rest has been told of already."""
    search = _mapping(document.data, "search")
    for raw, value in _mapping(_mapping(document.data, "serve"), "args").items():
        try:
            ((name, said),) = normalise_flags({raw: value}, allow_remote_code=True).items()
        except ValueError:
            continue
        yield ("serve", "args", name), (said,), None
    enqueue = search.get("enqueue")
    entries: dict[KeyPath, Any] = {("search", "baseline"): _mapping(search, "baseline")}
    entries |= {("search", "enqueue", i): flags for i, flags in enumerate(enqueue if isinstance(enqueue, list) else ())}
    for key, flags in entries.items():
        for name, value in _readable_names(flags):
            yield (*key, name), (value,), None
    for name, form in _readable_names(_mapping(search, "params")):
        try:
            values = _telling(read_param(form))
        except ValueError:
            values = ()
        yield ("search", "params", name), values, form


def _mapping(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _readable_names(flags: Any) -> Iterator[tuple[str, Any]]:
    for raw, value in flags.items() if isinstance(flags, dict) else ():
        try:
            yield flag_name(raw), value
        except ValueError:
            continue


def _telling(param: Param) -> Iterable[FlagValue]:
    """Return the values whose types and spellings stand for all: of a range of whole numbers its ends."""
    values = param.values()
    return (values[0], values[-1]) if isinstance(values, range) else values
