"""The weights of a model on disk, by the headers of its safetensors files; never more than the headers is read."""

from __future__ import annotations

import contextlib
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sweep.memory.json_file import UNREADABLE, read_json, read_object

# Of one element, by the names that the format gives its types.
ELEMENT_BYTES: dict[str, float] = {
    "C64": 8, "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "F6_E2M3": 0.75, "F6_E3M2": 0.75, "F4": 0.5,
}  # fmt: skip
# Of all files together: parsing more would take seconds. The largest models have 20 MB; the format allows 100 a file.
_LONGEST_HEADERS = 32_000_000
_LARGEST = 2**60


class Weights(NamedTuple):
    """file_bytes: of all tensors as they are stored. elements: how many of each type; None where that is not known."""

    file_bytes: int
    elements: dict[str, int] | None


def read_weights(folder: Path) -> Weights | None:
    """Return what the safetensors files of a folder hold; None where there are none that can be read.

    The headers are exact. The index stands in for them where not all files are there.
    """
    files = _files(folder)
    with contextlib.suppress(*UNREADABLE):
        return _of_headers(files)
    with contextlib.suppress(*UNREADABLE):
        return _of_index(folder)
    return None


def _index(folder: Path) -> dict[str, Any]:
    return read_object(folder / "model.safetensors.index.json")


def _of_index(folder: Path) -> Weights:
    return Weights(_count(_index(folder)["metadata"]["total_size"], least=1), None)


def _files(folder: Path) -> list[Path]:
    """Return the files that the index names, or else the one model file; repositories may hold copies besides."""
    with contextlib.suppress(*UNREADABLE):
        return [folder / name for name in sorted(set(_index(folder)["weight_map"].values()))]
    with contextlib.suppress(*UNREADABLE):
        single = folder / "model.safetensors"
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    return []


def _of_headers(files: list[Path]) -> Weights:
    elements: Counter[str] = Counter()
    total, room = 0, _LONGEST_HEADERS
    if not files:
        raise ValueError("there are no files")
    for file in files:
        header, length = _header(file, room)
        room -= length
        for tensor in header.values():
            elements[str(tensor["dtype"])] += prod(_count(size) for size in tensor["shape"])
            start, end = map(_count, tensor["data_offsets"])
            total += _count(end - start)
    known = all(kind in ELEMENT_BYTES for kind in elements)
    return Weights(_count(total, least=1), dict(elements) if known else None)


def _header(file: Path, room: int) -> tuple[dict[str, Any], int]:
    """Return the tensors that a file describes, and the header's length. The format: 8 bytes with that, then JSON."""
    if not file.is_file():
        raise ValueError(f"{file.name} is not there")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= room:
            raise ValueError(f"{file.name} is no safetensors file, or has too many tensors")
        header = read_json(stream.read(length))
    header.pop("__metadata__", None)
    return header, length


def _count(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ValueError(f"{value!r:.50} is no size")
    return value
