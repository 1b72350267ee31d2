"""YAML, read strictly, and with the line of every key kept so that an error can name it."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from sweep.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]

_MAX_BYTES = 1 << 20  # a search space is a page; a megabyte is a wrong file
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A parsed file: plain data, and the 1-based line on which each key or list entry stands.

    Files that say the same are equal, wherever they lie and however they are laid out.
    """

    path: Path = field(compare=False)
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(compare=False)

    def where(self, key: KeyPath) -> str:
        """Return "file:line" of a key, or of the nearest key above it that the file has.

        Dashes and underscores are the same, and a dot in a key is like a step down: flags are written in many ways.
        """
        lines = {_spelling(known): line for known, line in self.lines.items()}
        for end in range(len(key), -1, -1):
            if (spelling := _spelling(key[:end])) in lines:
                return f"{self.path}:{lines[spelling]}"
        return str(self.path)


def dotted_key(key: KeyPath) -> str:
    return ".".join(str(part) for part in key)


def _spelling(key: KeyPath) -> str:
    return dotted_key(key).replace("_", "-")


def read_yaml(path: Path) -> YamlFile:
    """Read one YAML mapping. Raises ConfigError naming file, line and fix for whatever is not one."""
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; a search space has a handful of levels") from None
    if node is None:
        raise ConfigError(f"{path}: the file is empty; start from one in search_spaces/")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: expected a mapping with the keys serve, search, load and run"
        )
    lines: dict[KeyPath, int] = {(): node.start_mark.line + 1}
    data = _Builder(path, lines).build(node, ())
    return YamlFile(path, data, lines)


def read_value(text: str, origin: str) -> Any:
    """Read one value as strictly as a file's. Raises ConfigError that begins with `origin`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{origin}: {text!r} is not a YAML value") from None
    return None if node is None else _Builder(Path(origin), {}).build(node, ())


def _read_text(path: Path) -> str:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{path}: not a file")
        if info.st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, which no search space is")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; the spaces that come along are in search_spaces/") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


class _Builder:
    """Turns a node graph into data. Aliases are refused: they hide values, and can blow up to gigabytes."""

    def __init__(self, path: Path, lines: dict[KeyPath, int]) -> None:
        self._path = path
        self._lines = lines
        self._seen: set[int] = set()
        self._scalars = yaml.SafeLoader("")

    def build(self, node: yaml.Node, key: KeyPath) -> Any:
        self._lines.setdefault(key, node.start_mark.line + 1)
        if len(key) > _MAX_DEPTH:
            raise self._error(node, "nested too deeply")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._seen:
            raise self._error(node, "an alias (*name) is not supported here; write the value out")
        self._seen.add(id(node))
        if node.tag not in {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}:
            raise self._error(node, f"the tag {node.tag!r} is not supported here")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        assert isinstance(node, yaml.SequenceNode)
        return [self.build(item, (*key, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, key: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(name, str):
                written = getattr(key_node, "value", "?")
                raise self._error(key_node, f"the key {written!r} is read as {type(name).__name__}: put it in quotes")
            if name in result:
                first = self._lines[(*key, name)]
                raise self._error(key_node, f"{name!r} stands twice (first on line {first}); keep one")
            self._lines[(*key, name)] = key_node.start_mark.line + 1
            result[name] = self.build(value_node, (*key, name))
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        plain = node.style is None
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, ArithmeticError):
            raise self._error(node, f"{node.value[:40]!r} cannot be read; put text in quotes") from None
        if plain and isinstance(value, int) and not isinstance(value, bool) and not node.value.lstrip("+-").isdecimal():
            # YAML 1.1 reads 12:30:45 as 45045 and 1_000 as 1000.
            raise self._error(node, f"{node.value!r} would be read as {value}; write the number plainly or quote it")
        if plain and isinstance(value, int) and node.value.lstrip("+-").startswith("0") and len(node.value) > 1:
            raise self._error(node, f"{node.value!r} would be read as octal ({value}); write the number plainly")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise self._error(node, f"{node.value!r} is read as a {type(value).__name__}; put it in quotes")
        if plain and isinstance(value, bool) and node.value.lower() in {"on", "off", "yes", "no", "y", "n"}:
            raise self._error(
                node, f"{node.value!r} would be read as {str(value).lower()}; write true, false or quote it"
            )
        return value

    def _error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self._path}:{node.start_mark.line + 1}: {message}")
