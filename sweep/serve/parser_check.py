"""What the vLLM that will serve makes of a config file, as its own parser reads it in a child process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.model import Flags
from sweep.serve.kind import ServeSection, clean_env, resolve_program

_CHILD = Path(__file__).with_name("vllm_child.py")
# Importing vLLM takes 15 to 25 s, on a cold file system far more; a model's configuration may come from the hub.
_TIMEOUT_S = 600.0
_MAX_ERROR = 4000


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """parsed: the flags of the file as vLLM read them. resolved: all flags as its engine would use them here.

    moe: whether the model is a mixture of experts. error: why it refuses the file, in its own words. unchecked: why
    nobody could be asked.
    """

    parsed: Flags | None = None
    resolved: Flags | None = None
    moe: bool | None = None
    error: str | None = None
    vllm_version: str | None = None
    unchecked: str | None = None


async def check_configs(serve: ServeSection, configs: Mapping[str, Path]) -> dict[str, ParsedConfig]:
    """Check config files, each under its name, all in one child process. MachineError when there is no program."""
    python = await asyncio.to_thread(_interpreter, serve.command)
    if python is None:
        reason = f"serve.command is neither `vllm` nor `python -m vllm…`: {' '.join(serve.command)}"
        return dict.fromkeys(configs, ParsedConfig(unchecked=reason))
    request = json.dumps({name: str(path.absolute()) for name, path in configs.items()})
    env = clean_env(os.environ) | serve.env | {"VLLM_LOGGING_LEVEL": "ERROR"}
    child = await asyncio.create_subprocess_exec(
        python,
        str(_CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(request.encode()), _TIMEOUT_S)
    except TimeoutError:
        return dict.fromkeys(configs, ParsedConfig(unchecked=f"vLLM's parser did not answer within {_TIMEOUT_S:.0f} s"))
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    return _read(out, err.decode(errors="replace"), configs)


def _read(out: bytes, err: str, configs: Mapping[str, Path]) -> dict[str, ParsedConfig]:
    try:
        answer: dict[str, Any] = json.loads(out)
    except json.JSONDecodeError:  # it died before it could say anything
        return dict.fromkeys(configs, ParsedConfig(error=err[-_MAX_ERROR:].strip() or "vLLM could not be imported"))
    version = answer["vllm_version"]
    return {name: ParsedConfig(**answer["configs"][name], vllm_version=version) for name in configs}


def _interpreter(command: tuple[str, ...]) -> str | None:
    """Return the Python that a command runs vLLM with, or None when it starts something else."""
    program = resolve_program(command[0])
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        runs_vllm = any(word == "vllm" or word.startswith("vllm.") for word in command[1:])
        return program if runs_vllm else None
    with open(program, "rb") as file:  # noqa: PTH123
        head = file.read(1000).decode(errors="replace")
    # The two ways in which pip writes a script's first lines, the second for long paths, and that of distributions.
    match = re.match(r"#!(/\S*python[\d.]*)|#!/bin/sh\n'''exec' \"?(/[^\"\n]*?python[\d.]*)\"? ", head)
    if match:
        return match[1] or match[2]
    by_name = re.match(r"#!/usr/bin/env (python[\d.]*)", head)
    return shutil.which(by_name[1]) if by_name else None
