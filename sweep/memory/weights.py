"""The weights of a model on disk, by the headers of its safetensors files; never more than the headers is read."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

# Of one element, by the names that the format gives its types.
ELEMENT_BYTES: dict[str, float] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "F4": 0.5,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the format's own limit


class Weights(NamedTuple):
    """file_bytes: of all tensors as they are stored. elements: how many of each type; None of an index alone."""

    file_bytes: int
    elements: dict[str, int] | None


def read_weights(folder: Path) -> Weights | None:
    """Return what the safetensors files of a folder hold; None where there are none that can be read.

    The headers are exact. The index stands in for them where not all files are there.
    """
    files = _files(folder)
    try:
        if files and all(file.is_file() for file in files):
            return _of_headers(files)
        total = _index(folder).get("metadata", {}).get("total_size")
        return Weights(int(total), None) if total else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _index(folder: Path) -> dict[str, dict[str, str]]:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return index if isinstance(index, dict) else {}


def _files(folder: Path) -> list[Path]:
    """Return the files that the index names, or else the one model file; repositories may hold copies besides."""
    try:
        return [folder / name for name in sorted(set(_index(folder)["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        single = folder / "model.safetensors"
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _of_headers(files: list[Path]) -> Weights:
    elements: Counter[str] = Counter()
    total = 0
    for file in files:
        for tensor in _header(file).values():
            elements[tensor["dtype"]] += prod(tensor["shape"])
            start, end = tensor["data_offsets"]
            total += end - start
    return Weights(total, dict(elements))


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors that a file describes. The format: 8 bytes with the header's length, then it, as JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _LONGEST_HEADER:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header  # type: ignore[no-any-return]
