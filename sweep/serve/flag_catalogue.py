"""The flags of the installed vLLM as its own parser has them: read once in a child process, then kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sweep.files import write_atomic
from sweep.model import FlagValue
from sweep.section import did_you_mean
from sweep.serve.flag_history import REMOVED
from sweep.serve.kind import ServeSection
from sweep.serve.parser_check import SilentChildError, ask
from sweep.serve.vllm_flags import ONLY_ON

_FORMAT = 2  # of the kept file; another one is read anew
_IDENTITY_TIMEOUT_S = 60.0
_SIZE = re.compile(r"auto|\d+(\.\d+)?[kmgt]|\d+[KMGT]")
_CHOICES_SHOWN = 12
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "size": "a whole number, or one such as 4k (4000) or 4K (4096)",
    "text": "text",
}


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """names: the long name first, then its other ones. kind: what the flag takes on a command line.

    A "toggle" takes nothing and has a `--no-` form, a "switch" takes nothing and has none, "value", "optional" and
    "list" take one value, at most one, and several. type: "int", "float", "text", "size" (whole, may be written 4k) or
    "other", of which nothing is known. default: as text; None where vLLM decides by model and device. or_none: whether
    the text None stands for no value.
    """

    names: tuple[str, ...]
    kind: str
    type: str
    choices: tuple[str, ...] | None = None
    default: str | None = None
    or_none: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All flags of one version of `vllm serve`. kept: whether they came from the file of an earlier call."""

    version: str
    flags: tuple[FlagSpec, ...]
    kept: bool = False
    _by_name: Mapping[str, FlagSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {name: spec for spec in self.flags for name in spec.names})

    def find(self, name: str) -> FlagSpec | None:
        """Return the flag of this name; of a nested option (`compilation-config.mode`) the flag that holds it."""
        return self._by_name.get(name.partition(".")[0])

    def name_problem(self, name: str) -> str | None:
        """Return what is wrong with a flag's name, and how to mend it; None for the exact long name of a flag."""
        head, dot, _ = name.partition(".")
        spec = self._by_name.get(head)
        if spec is None:
            return self._unknown(head)
        if head != spec.name:
            return f"is another name of {spec.name}: write that"
        if dot and spec.type != "other":
            return f"{head} holds no options of its own: leave out what follows the dot"
        return None

    def _unknown(self, name: str) -> str:
        if (toggle := self._by_name.get(name.removeprefix("no-"))) is not None:
            return f"is the negative form of a flag: write {toggle.name}, with the values true and false"
        if name in REMOVED:
            return f"vLLM {self.version} has no such flag any more: {REMOVED[name]}"
        known = [spec.name for spec in self.flags]
        if whole := [candidate for candidate in known if candidate.startswith(name)]:
            return f"is the beginning of a flag's name: write {' or '.join(whole[:4])}"
        return f"vLLM {self.version} has no such flag{did_you_mean(name, known)}"

    def value_problem(self, name: str, value: FlagValue) -> str | None:
        """Return why vLLM's parser cannot take this value; None also where that is for vLLM to say.

        name: of a known flag. What stands in a nested option or in JSON is left to vLLM.
        """
        spec = self.find(name)
        if spec is None or "." in name or value is None:
            return None
        if spec.kind in {"toggle", "switch"}:
            return _switch_problem(spec, value, self.version)
        if isinstance(value, bool):
            return None if spec.kind == "optional" else f"takes {_taken(spec)}, not {_shown(value)}"
        if isinstance(value, list):
            return _list_problem(spec, value)
        return _item_problem(spec, value)


def _switch_problem(spec: FlagSpec, value: FlagValue, version: str) -> str | None:
    if not isinstance(value, bool):
        return f"takes no value but true or false, not {_shown(value)}"
    if value is False and spec.kind == "switch" and spec.name not in ONLY_ON:
        return f"has no negative form in vLLM {version}: leave it out to have it off"
    return None


def _list_problem(spec: FlagSpec, value: list[Any]) -> str | None:
    if spec.kind != "list":
        return f"takes one value, not a list{'; write it as JSON in quotes' if spec.type == 'other' else ''}"
    return next((problem for item in value if (problem := _item_problem(spec, item))), None)


def _item_problem(spec: FlagSpec, value: FlagValue) -> str | None:
    if isinstance(value, dict):
        return None if spec.type == "other" or spec.kind == "list" else f"takes {_taken(spec)}, not a mapping"
    if isinstance(value, list | bool) or value is None or (value == "None" and spec.or_none):
        return None
    if not _is_of_type(str(value), spec.type):
        return f"takes {_taken(spec)}, not {_shown(value)}"
    if spec.choices and _choice(str(value), spec) not in {_choice(choice, spec) for choice in spec.choices}:
        near = did_you_mean(str(value), spec.choices)
        return f"cannot be {_shown(value)}{near}; allowed are {_choices(spec.choices)}"
    return None


def _choice(text: str, spec: FlagSpec) -> str:
    # Flags with a conversion of their own take either dash and either case.
    return text.lower().replace("-", "_") if spec.type == "other" else text


def _is_of_type(text: str, kind: str) -> bool:
    if kind == "size" and _SIZE.fullmatch(text):
        return True
    try:
        if kind in {"int", "size"}:
            int(text)
        elif kind == "float":
            float(text)
    except ValueError:
        return False
    return True


def _taken(spec: FlagSpec) -> str:
    choices = f" ({_choices(spec.choices)})" if spec.choices else ""
    return f"{_WANTED.get(spec.type, 'a value')}{choices}"


def _choices(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:_CHOICES_SHOWN]) + (", …" if len(choices) > _CHOICES_SHOWN else "")


def _shown(value: FlagValue) -> str:
    return json.dumps(value, default=str)


async def kept_catalogue(serve: ServeSection, folder: Path | None = None) -> Catalogue | None:
    """Return the installed vLLM's flags if they have been read before; None otherwise. Imports no vLLM: 0.1 s.

    folder: where they are kept. Raises MachineError when serve.command names no program.
    """
    name = await _file_name(serve)
    folder = folder or cache_folder()
    return _read(folder / name) if name and folder else None


async def read_catalogue(serve: ServeSection, folder: Path | None = None, *, anew: bool = False) -> Catalogue | None:
    """Return the installed vLLM's flags, from the file of an earlier call or from its parser, which takes 10 to 30 s.

    anew: from the parser in any case. None where there is no vLLM whose parser could be read: that is for the check of
    the flags themselves to explain. Raises MachineError when serve.command names no program.
    """
    name = await _file_name(serve)
    if name is None:
        return None
    folder = folder or cache_folder()
    if folder and not anew and (kept := _read(folder / name)) is not None:
        return kept
    try:
        answer = await ask(serve, {"ask": "flags"})
    except SilentChildError:
        return None
    catalogue = None if "error" in answer else _catalogue(answer["vllm_version"], answer["flags"], kept=False)
    if catalogue is not None and folder:
        document = {
            "format": _FORMAT,
            "vllm_version": catalogue.version,
            "flags": [asdict(spec) for spec in catalogue.flags],
        }
        with suppress(OSError):  # it is read again next time
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, json.dumps(document))
    return catalogue


def cache_folder() -> Path | None:
    """Return where flags are kept: they belong to this machine's vLLM and not to a study. None without a home."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # as the XDG specification has it
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "vllm-sweep" / "flags"


async def _file_name(serve: ServeSection) -> str | None:
    """Return the file for this interpreter's vLLM as it is now: another version, an edit, a plugin make another one."""
    try:
        identity = await ask(serve, {"ask": "identity"}, timeout_s=_IDENTITY_TIMEOUT_S)
    except SilentChildError:
        return None
    if identity is None:
        return None
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{identity['version'] or 'unknown'}-{digest[:16]}.json"


def _read(place: Path) -> Catalogue | None:
    """Return what a file holds; None when it is absent or not what it should be."""
    try:
        if not place.is_file():  # a pipe would be waited for
            return None
        document = json.loads(place.read_bytes())
        if document["format"] != _FORMAT:
            return None
        catalogue = _catalogue(document["vllm_version"], document["flags"], kept=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return catalogue if catalogue.flags else None


def _catalogue(version: str, flags: list[dict[str, Any]], *, kept: bool) -> Catalogue:
    specs = [
        FlagSpec(
            names=_texts(flag["names"]),
            kind=str(flag["kind"]),
            type=str(flag["type"]),
            choices=_texts(flag["choices"]) if flag["choices"] else None,
            default=flag["default"],
            or_none=bool(flag["or_none"]),
        )
        for flag in flags
        if flag["names"]
    ]
    return Catalogue(str(version), tuple(specs), kept)


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise TypeError("not a list")
    return tuple(map(str, found))
