"""Run by the interpreter that serves: says what its vLLM makes of config files. Imports nothing of this project.

In: one JSON document on stdin, {name: path of a config file}. Out: one on stdout,
{"vllm_version": …, "configs": {name: {"parsed": {…}, "resolved": {…}, "moe": …, "error": …}}}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any

# Flags whose value stands under another name in the engine's configuration.
_RENAMED = {"kv_cache_dtype": "cache_dtype"}
_PARTS = ("model_config", "cache_config", "parallel_config", "scheduler_config", "lora_config", "load_config")


def main() -> None:
    sys.path.pop(0)  # this folder, where a module could hide one of vLLM's
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM's log goes to stdout
    request: dict[str, str] = json.load(sys.stdin)
    version = None
    try:
        import vllm  # noqa: PLC0415  (whatever goes wrong here is an answer)

        version = str(vllm.__version__)
        parser = _top_level_parser()
    except Exception as error:  # noqa: BLE001
        configs = {name: {"error": _chain(error)} for name in request}
    else:
        configs = {name: _check(parser, path) for name, path in request.items()}
    json.dump({"vllm_version": version, "configs": configs}, answers)
    answers.close()
    os._exit(0)  # threads that torch has started may hold up an ordinary exit


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
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(["serve", "--config", path])
    except SystemExit:
        # argparse prints the whole usage before the one line that matters.
        text = said.getvalue()
        return {"error": text[max(text.rfind("\n", 0, text.rfind(": error: ")), 0) :].strip()}
    except Exception as error:  # noqa: BLE001
        return {"error": _chain(error)}
    parsed = {_flag(name): _plain(getattr(args, name)) for name in _given(path) if hasattr(args, name)}
    try:
        return {"parsed": parsed, **_resolved(args)}
    except Exception as error:  # noqa: BLE001
        return {"parsed": parsed, "error": _chain(error)}


def _given(path: str) -> list[str]:
    """Return the parser's names of the flags that a config file sets."""
    import yaml  # noqa: PLC0415  (vLLM needs it, so it is there when vLLM is)

    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        keys = [str(key).partition(".")[0].replace("-", "_") for key in yaml.safe_load(file)]
    return sorted({key.removeprefix("no_") for key in keys})


def _resolved(args: Any) -> dict[str, Any]:
    """Return the flags as the engine would use them, vLLM's defaults filled in for this model and device.

    Beside them whether the model is a mixture of experts; None where this vLLM does not say.
    """
    from vllm import AsyncEngineArgs  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # Some defaults depend on who asks; these are the API server's.
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    parts = [config, *(part for name in _PARTS if (part := getattr(config, name, None)) is not None)]
    resolved = {}
    for name in vars(engine_args):
        attribute = _RENAMED.get(name, name)
        value = next((_plain(getattr(part, attribute)) for part in parts if hasattr(part, attribute)), None)
        if isinstance(value, bool | int | float | str):
            resolved[_flag(name)] = value
    return {"resolved": resolved, "moe": getattr(config.model_config, "is_moe", None)}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
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
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


if __name__ == "__main__":
    main()
