"""JSON in files that others made: an object, or one of a few errors; never a wait, never a whole disk read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# What damaged files and impossible paths raise: of reading, of decoding (too deep), of values that are not as expected.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
_LONGEST = 32_000_000


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a file. Raises one of UNREADABLE."""
    if not file.is_file():  # a pipe would be waited for
        raise ValueError(f"{file.name} is no file")
    with file.open("rb") as stream:
        text = stream.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ValueError(f"{file.name} is too long")
    return read_json(text)


def read_json(text: bytes) -> dict[str, Any]:
    """Return the object in a text. Raises ValueError or RecursionError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no object")  # noqa: TRY004 - a value like any other that cannot be read
    return found
