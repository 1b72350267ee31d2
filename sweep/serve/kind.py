"""How a vLLM server is started: the `serve:` section, the command line, the environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from sweep.errors import MachineError
from sweep.model import Flags, Launch
from sweep.section import Section
from sweep.serve.vllm_flags import normalise_flags

CONFIG_NAME = "serve.yaml"

# Carried by every process of a launch, so that none is missed when it ends. Not called VLLM_…, because vLLM warns of
# variables of that name that it does not know, and refuses them with --fail-on-environ-validation.
MARKER = "SWEEP_LAUNCH"

# Its own cleaning up on SIGTERM. vLLM's default of 0 kills the engine at once, which leaves shared memory behind.
_SHUTDOWN_TIMEOUT_S = 15

# Left over from another server in this shell, or put there by Kubernetes for a service that is called vllm.
_NOT_INHERITED = (
    "VLLM_API_KEY",
    "VLLM_DP_",
    "VLLM_ELASTIC_EP",
    "VLLM_PORT",
    "VLLM_RPC_BASE_PATH",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_SERVICE_",
)
_OWNED_ENV = frozenset({"TMPDIR", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "SPT_NOENV", MARKER})
_SECRET_WORD = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD)(?:_|$)", re.IGNORECASE)


class ServeSection(Section):
    """The model, and what all launches of a sweep have in common."""

    model: str
    revision: str | None = None
    command: tuple[str, ...] = Field(default=("vllm", "serve"), min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    allow_remote_code: bool = False  # before args, whose check needs it
    args: Flags = Field(default_factory=dict)
    start_timeout_s: float = Field(default=1800.0, gt=0)
    stall_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=40.0, gt=0)

    @field_validator("model")
    @classmethod
    def _sane_model(cls, model: str) -> str:
        _check_word("the model", model)
        try:
            path = Path(model).expanduser()
            return str(path.absolute()) if model.startswith("~") or path.is_dir() else model
        except (OSError, RuntimeError) as error:  # too long a name, no such user
            raise ValueError(f"the model cannot be looked up as a path: {error}") from None

    @field_validator("revision")
    @classmethod
    def _sane_revision(cls, revision: str | None) -> str | None:
        if revision is not None:
            _check_word("the revision", revision)
        return revision

    @field_validator("command")
    @classmethod
    def _sane_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        for word in command:
            if not word or not word.isprintable():
                raise ValueError(f"the command has an empty word or a control character in it: {word!r}")
        return command

    @field_validator("env", mode="before")
    @classmethod
    def _sane_env(cls, env: Any) -> Any:
        if not isinstance(env, dict):
            return env
        return {name: _check_variable(name, value) for name, value in env.items()}

    @field_validator("args", mode="before")
    @classmethod
    def _known_args(cls, args: Any, info: ValidationInfo) -> Any:
        if not isinstance(args, dict):
            return args
        return normalise_flags(args, allow_remote_code=info.data.get("allow_remote_code", False))

    def launch(self, flags: Flags, *, swept: tuple[str, ...], trial_dir: Path) -> Launch:
        """Return the launch of one trial: the fixed flags, and `flags` over them."""
        return Launch(
            model=self.model,
            revision=self.revision,
            command=self.command,
            env=self.env,
            flags={**self.args, **flags},
            swept=swept,
            trial_dir=str(trial_dir.absolute()),
            start_timeout_s=self.start_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
        )


def _check_word(what: str, text: str) -> None:
    if not text or len(text) > 1000 or not text.isprintable() or any(char.isspace() for char in text):
        raise ValueError(f"{what} must be a name or a path without spaces or control characters")
    if text.startswith("-"):
        raise ValueError(f"{what} must not begin with a dash: it would be read as a flag")


def _check_variable(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    if _SECRET_WORD.search(name):
        raise ValueError(f"{name} looks like a secret: export it in the shell, so that it is written to no file")
    if name in _OWNED_ENV:
        raise ValueError(f"{name} is set by every launch itself")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}: put the value in quotes, as in {name}: '1'")  # noqa: TRY004  (pydantic wants it)
    if "\0" in str(value):
        raise ValueError(f"{name}: the value holds a NUL character")
    return str(value)


def resolve_program(name: str) -> str:
    """Return the path of a program: beside this Python first, so that a virtual environment needs no activation."""
    if os.sep in name:
        path = Path(os.path.expanduser(name)).absolute()  # noqa: PTH111 - another user's home may not exist
        found = str(path) if os.access(path, os.X_OK) and path.is_file() else None
    else:
        beside = str(Path(sys.executable).parent)
        found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise MachineError(
            f"serve.command starts {name!r}, which is not a program on this machine. "
            "Install vLLM beside vllm-sweep, or name the program of its environment, as in /path/to/venv/bin/vllm."
        )
    return found


def argv(launch: Launch, port: int) -> list[str]:
    """Return the command line of a launch. What is measured stands in serve.yaml; the rest is how it is run here."""
    return [
        resolve_program(launch.command[0]),
        *launch.command[1:],
        # As two words: vLLM 0.32 ignores --config=FILE.
        "--config",
        str(Path(launch.trial_dir) / CONFIG_NAME),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--shutdown-timeout",
        str(_SHUTDOWN_TIMEOUT_S),
        "--disable-uvicorn-access-log",
    ]


def served_model(launch: Launch) -> str:
    """Return the name under which requests ask for the model."""
    name = launch.flags.get("served-model-name", launch.model)
    return str(name[0] if isinstance(name, list) else name)


def clean_env(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that any vLLM of a sweep starts from."""
    env = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    return env | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def child_env(launch: Launch, inherited: Mapping[str, str], *, marker: str, api_key: str, tmp: Path) -> dict[str, str]:
    """Return the environment of a launch.

    Only variables that vLLM leaves out of the key of its compile cache may differ from launch to launch.
    """
    env = clean_env(inherited) | {
        # vLLM renames its processes, which wipes their environment, and the marker with it, unless this is set.
        "SPT_NOENV": "1",
        MARKER: marker,
        "VLLM_API_KEY": api_key,
        "TMPDIR": str(tmp),
        "VLLM_RPC_BASE_PATH": str(tmp),
    }
    # torch keeps compiled kernels under TMPDIR; those are worth keeping from launch to launch.
    user = inherited.get("USER", str(os.getuid()))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp.parent / f"torchinductor_{user}"))
    return env | launch.env
