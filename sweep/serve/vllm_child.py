"""Run by the interpreter that serves: says what its vLLM is and takes. Imports nothing of this project.

In: one JSON document on stdin. Out: one on stdout.

{"ask": "identity"}  ->  {"python": …, "folder": …, "version": …, "files": …, "plugins": …, "chosen": …}, without an
    import of vLLM; null where there is none.
{"ask": "flags"}  ->  {"vllm_version": …, "flags": [{"names": […], "kind": …, "type": …, "choices": …, "default": …,
    "or_none": …}]}
{"ask": "configs", "configs": {name: path of a config file}, "base": name, "compared": [name]}
    ->  {"vllm_version": …, "platform": …, "shown": [flag],
         "configs": {name: {"parsed": {…}, "resolved": {…}, "moe": …, "changes": {…}, "error": …}}}
    changes: of the compared ones, what of the engine's configuration is otherwise than the base's. shown: the flags
    that the engine's configuration shows at all.

With "if_there": true the answer is null where there is no vLLM, to any question.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib.util
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Flags whose value stands under another name in the engine's configuration.
_RENAMED = {
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "attention_backend": ("attention_config", "backend"),
    "scheduling_policy": ("scheduler_config", "policy"),
}
_PARTS = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "lora_config",
    "load_config",
    "compilation_config",
    "kernel_config",
    "observability_config",
)
# Where the names, types and choices of the flags are written down.
_SOURCES = ("_version.py", "engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/*.py", "config/*.py")
_TYPES = {"int": "int", "float": "float", "str": "text", "human_readable_int": "size"}
_MAX_TEXT = 200


def main() -> None:
    sys.path.pop(0)  # this folder, where a module could hide one of vLLM's
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM's log goes to stdout
    request: dict[str, Any] = json.load(sys.stdin)
    answer = None
    if not request.get("if_there") or _folder() is not None:
        answer = {"identity": _identity, "flags": _flags, "configs": _configs}[request["ask"]](request)
    json.dump(answer, answers)
    answers.close()
    os._exit(0)  # threads that torch has started may hold up an ordinary exit


def _folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _identity(_request: dict[str, Any]) -> dict[str, Any] | None:
    folder = _folder()
    if folder is None:
        return None
    files = sorted(path for pattern in _SOURCES for path in folder.glob(pattern))
    states = [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
    return {
        "python": sys.version,
        "folder": str(folder),
        "version": _written_version(folder),
        "files": digest,
        "plugins": _plugins(),
        "chosen": os.environ.get("VLLM_PLUGINS"),
    }


def _plugins() -> list[list[str]]:
    """Return what other packages add to vLLM, which may be flags: group, name, what is loaded, version."""
    found = []
    for package in metadata.distributions():
        try:
            added = [entry for entry in package.entry_points if entry.group.startswith("vllm.")]
            found += [[entry.group, entry.name, entry.value, package.version] for entry in added]
        except Exception:  # noqa: BLE001, S112  (an installation that is broken adds nothing)
            continue
    return sorted(found)


def _written_version(folder: Path) -> str | None:
    try:
        text = (folder / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"""^(?:__version__|version)\b[^'"\n]*=[^'"\n]*['"]([\w.+!-]{1,60})['"]""", text, re.MULTILINE)
    return match[1] if match else None


def _flags(_request: dict[str, Any]) -> dict[str, Any]:
    try:
        import vllm  # noqa: PLC0415  (whatever goes wrong here is an answer)

        groups = [action for action in _top_level_parser()._actions if isinstance(action.choices, dict)]  # noqa: SLF001
        serve = groups[0].choices["serve"]
        actions = [action for action in serve._actions if action.option_strings and action.dest != "help"]  # noqa: SLF001
        flags = [_described(action) for action in actions]
    except Exception as error:  # noqa: BLE001
        return {"error": _chain(error)}
    return {"vllm_version": str(vllm.__version__), "flags": flags}


def _described(action: Any) -> dict[str, Any]:
    """Return a flag's names (the long ones first, `--no-` forms left out), what it takes, and its default as text."""
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    if action.nargs == 0:
        kind = "toggle" if any(name.startswith("--no-") for name in action.option_strings) else "switch"
    else:
        kind = "value" if action.nargs is None else "optional" if action.nargs == "?" else "list"
    choices = [str(choice) for choice in action.choices or () if choice is not None]
    return {
        "names": [name.lstrip("-") for name in sorted(names, key=lambda name: not name.startswith("--"))],
        "kind": kind,
        "type": _type_word(action.type),
        "choices": choices or None,
        "or_none": getattr(action.type, "__name__", "") == "_optional_type",
        "default": None if action.default is None else str(_plain(action.default))[:_MAX_TEXT],
    }


def _type_word(kind: Any) -> str:
    """Return "int", "float", "text", "size" (which may be written 4k), or "other"."""
    if kind is None:
        return "text"
    if getattr(kind, "__name__", "") == "_optional_type":  # vLLM's wrapper of the type that it lets be None
        kind = next((cell.cell_contents for cell in kind.__closure__ or ()), None)
    name = getattr(kind, "__name__", "").removesuffix("_or_auto")
    return _TYPES.get(name, "other")


def _configs(request: dict[str, Any]) -> dict[str, Any]:
    paths: dict[str, str] = request["configs"]
    version = platform = None
    try:
        import vllm  # noqa: PLC0415

        version = str(vllm.__version__)
        parser = _top_level_parser()
        platform = _platform()
    except Exception as error:  # noqa: BLE001
        configs = {name: {"error": _chain(error)} for name in paths}
        return {"vllm_version": version, "platform": platform, "shown": [], "configs": configs}
    compared = set(request["compared"])
    configs = {name: _check(parser, path) for name, path in paths.items() if name not in compared}
    shown: list[str] = []
    base: str = request["base"]
    if compared and not configs[base].get("error"):
        shown, changes = _compare(parser, paths[base], {name: paths[name] for name in paths if name in compared})
        configs |= changes
    return {"vllm_version": version, "platform": platform, "shown": shown, "configs": configs}


def _platform() -> str | None:
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415

        # ROCm calls its devices cuda, as torch does.
        return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)
    except Exception:  # noqa: BLE001  (older ones have no such thing; the flags are checked all the same)
        return None


def _top_level_parser() -> Any:
    """Return the parser of the program `vllm`. Only this one has the ways of `vllm serve --config`."""
    from vllm.entrypoints.cli.serve import cmd_init  # noqa: PLC0415

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    except ImportError:  # until 0.11
        from vllm.utils import FlexibleArgumentParser  # noqa: PLC0415
    parser = FlexibleArgumentParser(prog="vllm", description="vLLM CLI")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers)
    return parser


def _check(parser: Any, path: str) -> dict[str, Any]:
    args, error = _parse(parser, path)
    if error is not None:
        return {"error": error}
    parsed = {_flag(name): _plain(getattr(args, name)) for name in _given(path) if hasattr(args, name)}
    try:
        return {"parsed": parsed, **_resolved(*_build(args))}
    except Exception as refused:  # noqa: BLE001
        return {"parsed": parsed, "error": _chain(refused)}


def _parse(parser: Any, path: str) -> tuple[Any, str | None]:
    """Return the arguments of a config file, or why the parser refuses it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(["serve", "--config", path]), None
    except SystemExit:
        # argparse prints the whole usage before the one line that matters.
        text = said.getvalue()
        return None, text[max(text.rfind("\n", 0, text.rfind(": error: ")), 0) :].strip()
    except Exception as error:  # noqa: BLE001
        return None, _chain(error)


def _given(path: str) -> list[str]:
    """Return the parser's names of the flags that a config file sets."""
    import yaml  # noqa: PLC0415  (vLLM needs it, so it is there when vLLM is)

    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        keys = [str(key).partition(".")[0].replace("-", "_") for key in yaml.safe_load(file)]
    return sorted({key.removeprefix("no_") for key in keys})


def _build(args: Any) -> tuple[Any, Any]:
    """Return the engine's arguments, and its configuration: vLLM's defaults filled in for this model and device."""
    from vllm import AsyncEngineArgs  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # Some defaults depend on who asks; these are the API server's.
    return engine_args, engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _resolved(engine_args: Any, config: Any) -> dict[str, Any]:
    """Return the flags as the engine would use them.

    Beside them whether the model is a mixture of experts; None where this vLLM does not say.
    """
    resolved = {}
    for name in vars(engine_args):
        value = next((_plain(value) for value in _values(config, name)), None)
        if isinstance(value, bool | int | float | str):
            resolved[_flag(name)] = value
    return {"resolved": resolved, "moe": getattr(config.model_config, "is_moe", None)}


def _values(config: Any, name: str) -> Iterator[Any]:
    """Yield what the parts of the engine's configuration have under an argument's name."""
    if name in _RENAMED:
        part, attribute = _RENAMED[name]
        held = getattr(config, part, None)
        if hasattr(held, attribute):
            yield getattr(held, attribute)
        return
    for part in (config, *(getattr(config, part, None) for part in _PARTS)):
        if hasattr(part, name):
            yield getattr(part, name)


def _compare(parser: Any, base_path: str, paths: dict[str, str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Build the engine's configuration for each file, and return how it differs from the base's.

    The base is built twice at first: what differs between those two (an id) says nothing. It is built once more at the
    end: where one build changes a flag's value in the next, the differences say nothing either, and are left out.
    """
    args, _ = _parse(parser, base_path)
    engine_args, config = _build(args)
    shown = sorted(_flag(name) for name in vars(engine_args) if any(True for _ in _values(config, name)))
    base = _flattened(config)
    noise = set(_changes(base, _flattened(_build(_parse(parser, base_path)[0])[1])))
    answers: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        args, error = _parse(parser, path)
        try:
            answers[name] = (
                {"error": error} if error else {"changes": _changes(base, _flattened(_build(args)[1]), noise)}
            )
        except Exception as refused:  # noqa: BLE001
            answers[name] = {"error": _chain(refused)}
    drift = _changes(base, _flattened(_build(_parse(parser, base_path)[0])[1]), noise)
    if drift or any(path.rpartition(".")[2] in vars(engine_args) for path in noise):
        answers = {name: {"error": answer.get("error")} for name, answer in answers.items()}
    return shown, answers


def _changes(base: dict[str, str], other: dict[str, str], noise: Any = ()) -> dict[str, str | None]:
    return {
        path: other.get(path)
        for path in sorted(base.keys() | other.keys())
        if path not in noise and base.get(path) != other.get(path)
    }


def _flattened(value: Any, path: str = "", above: tuple[int, ...] = ()) -> dict[str, str]:
    """Return everything in a configuration as texts, under names such as `scheduler_config.max_num_seqs`."""
    if id(value) in above:
        return {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, str] = {}
        for name, part in vars(value).items():
            found |= _flattened(part, f"{path}.{name}" if path else name, (*above, id(value)))
        return found
    text = json.dumps(_plain(value))
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}… {hashlib.sha256(text.encode()).hexdigest()}"
    return {path: text}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value).removeprefix("torch.")


def _chain(error: BaseException | None) -> str:
    """Return the messages of an exception and of those it came from, the first one first."""
    messages: list[str] = []
    while error is not None:
        messages.insert(0, "".join(traceback.format_exception_only(type(error), error)).strip())
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(messages)


if __name__ == "__main__":
    main()
