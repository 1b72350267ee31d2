"""What one check of `doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """failure: a sweep started now would end with an error. warning: it may, or its figures may be worth less."""

    name: str
    status: Literal["ok", "warning", "failure"]
    seen: str
    remedy: str | None = None


def ok(name: str, seen: str) -> list[Check]:
    return [Check(name, "ok", seen)]


def warning(name: str, seen: str, remedy: str) -> list[Check]:
    return [Check(name, "warning", seen, remedy)]


def failure(name: str, seen: str, remedy: str) -> list[Check]:
    return [Check(name, "failure", seen, remedy)]
