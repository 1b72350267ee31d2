"""Numbers as flags, logs and files have them: what can be read, and what cannot be known."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_WRITTEN = re.compile(r"(\d+)(\.\d+)?([kmgtKMGT])", re.ASCII)
_POWERS = "kmgt"
_LARGEST = 2**60  # nothing that is counted here comes near it: what is larger is damaged


def size_of(value: object) -> int | None:
    """Return a whole number above zero; None for anything else.

    Texts are read as vLLM reads them (vllm/utils/argparse_utils.py, `human_readable_int`): k, m, g and t stand for
    powers of 1000, K, M, G and T for powers of 1024, the latter after whole numbers only.
    """
    number = _read(value.strip()) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= _LARGEST:
        return None
    return int(number) if number == int(number) else None


def number_of(value: object) -> float | None:
    """Return a number that is finite and not absurd; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def flag_size(flags: Mapping[str, object], name: str, default: int) -> int | None:
    """Return the size that a flag sets, or the default where it sets none; None where what it sets cannot be read."""
    value = flags.get(name)
    return default if value is None else size_of(value)


def _read(text: str) -> int | None:
    if match := _WRITTEN.fullmatch(text):
        whole, decimals, unit = match.groups()
        power = _POWERS.index(unit.lower()) + 1
        if unit in _POWERS:
            number = float(whole + (decimals or "")) * 1000**power
            return int(number) if math.isfinite(number) else None
        return None if decimals else int(whole) * 1024**power
    try:
        return int(text)
    except ValueError:
        return None
