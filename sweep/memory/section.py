"""The `memory:` section of a search space."""

from __future__ import annotations

from sweep.section import Section


class MemorySection(Section):
    """What a sweep does with what it knows of the device's memory.

    skip: whether to pass over configurations that are known not to fit; false launches every one of them.
    """

    skip: bool = True
