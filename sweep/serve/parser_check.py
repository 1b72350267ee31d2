"""What the vLLM that will serve makes of a config file, as its own parser reads it in a child process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sweep.model import Flags
from sweep.serve.kind import ServeSection, clean_env, resolve_program

_CHILD = Path(__file__).with_name("vllm_child.py")
# Importing vLLM takes 15 to 25 s, on a cold file system far more; a model's configuration may come from the hub.
_TIMEOUT_S = 600.0
_MAX_ERROR = 4000


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """parsed: the flags of the file as vLLM read them. resolved: all flags as its engine would use them here.

    moe: whether the model is a mixture of experts. changes: what of the engine's whole configuration is otherwise than
    with the base's file, by its place in it (`scheduler_config.max_num_seqs`) and as text. error: why it refuses the
    file, in its own words. platform: "cpu", "cuda", "rocm", … unchecked: why nobody could be asked.
    """

    parsed: Flags | None = None
    resolved: Flags | None = None
    moe: bool | None = None
    changes: dict[str, str | None] | None = None
    error: str | None = None
    vllm_version: str | None = None
    platform: str | None = None
    unchecked: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: of each config file its changes against the base, or an error; shown: the flags that would show."""

    compared: dict[str, ParsedConfig]
    shown: frozenset[str]


class Interpreter(NamedTuple):
    """The Python that a command runs. serves: whether it is certain that vLLM runs in it, and nowhere else."""

    program: str
    serves: bool


class SilentChildError(Exception):
    """No answer came from the interpreter that serves. The message is what it said instead, or why it was not asked."""

    def __init__(self, message: str, *, asked: bool) -> None:
        super().__init__(message)
        self.asked = asked


async def check_configs(serve: ServeSection, configs: Mapping[str, Path]) -> dict[str, ParsedConfig]:
    """Check config files, each under its name, all in one child process. MachineError when there is no program."""
    return (await compare_configs(serve, configs)).compared


async def compare_configs(
    serve: ServeSection, configs: Mapping[str, Path], *, base: str | None = None, compared: Sequence[str] = ()
) -> Comparison:
    """Check config files; of those in `compared` find out what they change in the engine's configuration.

    base: the name of the file that they are compared with; where it is refused itself, nothing is compared, and the
    answer lacks them. MachineError when there is no program.
    """
    request = {
        "ask": "configs",
        "configs": {name: str(path.absolute()) for name, path in configs.items()},
        "base": base,
        "compared": list(compared),
    }
    try:
        answer = await ask(serve, request, timeout_s=_TIMEOUT_S)
    except SilentChildError as silence:
        nothing = ParsedConfig(error=str(silence)) if silence.asked else ParsedConfig(unchecked=str(silence))
        return Comparison(dict.fromkeys(configs, nothing), frozenset())
    told = {"vllm_version": answer["vllm_version"], "platform": answer["platform"]}
    found = {name: ParsedConfig(**found, **told) for name, found in answer["configs"].items()}
    return Comparison(found, frozenset(answer["shown"]))


async def ask(serve: ServeSection, request: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S) -> Any:
    """Return the answer of vllm_child.py, run by the interpreter that serves. Raises SilentChildError, MachineError."""
    python = await asyncio.to_thread(interpreter, serve.command)
    unknown = SilentChildError(
        f"serve.command is neither `vllm` nor `python -m vllm…`: {' '.join(serve.command)}", asked=False
    )
    if python is None:
        raise unknown
    child = await asyncio.create_subprocess_exec(
        python.program,
        str(_CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_env(os.environ) | serve.env | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    try:
        asked = json.dumps({**request, "if_there": not python.serves})
        out, err = await asyncio.wait_for(child.communicate(asked.encode()), timeout_s)
    except TimeoutError:
        raise SilentChildError(f"vLLM's parser did not answer within {timeout_s:.0f} s", asked=False) from None
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    try:
        answer = json.loads(out)
    except json.JSONDecodeError:  # it died before it could say anything
        said = err.decode(errors="replace")[-_MAX_ERROR:].strip()
        raise SilentChildError(said or "vLLM could not be imported", asked=python.serves) from None
    if answer is None and not python.serves:
        raise unknown
    return answer


def interpreter(command: tuple[str, ...]) -> Interpreter | None:
    """Return the Python that a command runs vLLM with, or None when it starts something else."""
    program = resolve_program(command[0])
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        runs_vllm = any(word == "vllm" or word.startswith("vllm.") for word in command[1:])
        return Interpreter(program, serves=True) if runs_vllm else None
    with open(program, "rb") as file:  # noqa: PTH123
        head = file.read(1000).decode(errors="replace")
    # The two ways in which pip writes a script's first lines, the second for long paths, and that of distributions.
    match = re.match(r"#!(/\S*python[\d.]*)|#!/bin/sh\n'''exec' \"?(/[^\"\n]*?python[\d.]*)\"? ", head)
    by_name = re.match(r"#!/usr/bin/env (python[\d.]*)", head)
    python = (match[1] or match[2]) if match else by_name and shutil.which(by_name[1])
    # Any other script may start vLLM in a container, or elsewhere on this machine.
    serves = re.search(r"^(?:from|import) vllm\b", head, re.MULTILINE) is not None
    return Interpreter(python, serves) if python else None
