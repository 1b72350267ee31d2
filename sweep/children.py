"""How this program starts its own modules as child processes, and how they talk over their pipes."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8


def python_env() -> dict[str, str]:
    """Return an environment in which a child runs this very code, from whichever folder the program was started."""
    here = str(Path(__file__).resolve().parents[1])
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{rest}" if rest else here}


def packed(message: Any) -> bytes:
    """Pickle a message behind its length. Only for pipes between a process and its own child."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message, None at the end of the pipe."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return pickle.loads(await reader.readexactly(length))  # noqa: S301 - written by our own other half
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
