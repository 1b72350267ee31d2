"""The numbers that a message names, under the keys of `sweep.failure.BOUNDS`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sweep.serve.vllm_log import number

_GIB = 1024**3
_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": _GIB,
    "KB": 1024,
    "MB": 1024**2,
    "GB": _GIB,
    "TiB": 1024**4,
}
_SIZE = r"([\d.]+) ?(bytes|[KMGT]?i?B)\b"
# In torch's words of 2.1 and later, and in the older ones.
_TORCH: dict[str, tuple[re.Pattern[str], ...]] = {
    "allocation_bytes": (re.compile(rf"Tried to allocate {_SIZE}"),),
    "total_bytes": (re.compile(rf"total capacity of {_SIZE}"), re.compile(rf"{_SIZE} total capacity")),
    "free_bytes": (re.compile(rf"of which {_SIZE} is free"), re.compile(rf"; {_SIZE} free[;)]")),
}


def named(groups: Mapping[str, str | None]) -> dict[str, float]:
    """Return the numbers of a pattern's named groups; those that end in _gib in bytes."""
    numbers = {name: value for name, text in groups.items() if text and (value := number(text)) is not None}
    # A size of 0.0 GiB has been rounded away: how much it was is not known.
    numbers = {name: value for name, value in numbers.items() if value or not name.endswith("_gib")}
    return {
        f"{name[:-4]}_bytes" if name.endswith("_gib") else name: value * _GIB if name.endswith("_gib") else value
        for name, value in numbers.items()
    }


def of_torch(text: str) -> dict[str, float]:
    """Return what torch says of an allocation that failed."""
    found = {}
    for key, patterns in _TORCH.items():
        match = next((match for pattern in patterns if (match := pattern.search(text))), None)
        value = number(match[1]) if match else None
        if match and value is not None and match[2] in _UNITS:
            found[key] = value * _UNITS[match[2]]
    return found
