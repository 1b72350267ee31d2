"""Whether the packages that this program itself needs are there. Imports none of them, so that it can say so."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet

from sweep.run.doctor_line import Check, failure, ok

_MODULES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}  # whose name is not that of their package
_REMEDY = "Install this program again, with its packages: `make setup`, or `pip install -e .` in a checkout."


@dataclass(frozen=True, slots=True)
class Package:
    """A package that this program needs, in the versions `wanted`. version: None where it is not installed."""

    name: str
    wanted: str
    version: str | None
    importable: bool


def own_packages() -> list[Package]:
    """Return what this program says it needs. Raises PackageNotFoundError where it is not installed itself."""
    found = []
    for line in metadata.requires("vllm-sweep") or ():
        match = re.match(r"([\w.-]+)\s*([^;]*)$", line)
        if match:  # the other lines belong to extras
            name = match[1].lower()
            module = _MODULES.get(name, name.replace("-", "_"))
            there = importlib.util.find_spec(module) is not None
            found.append(Package(match[1], match[2].strip(), _version(name), there))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages() -> list[Check]:
    try:
        wanted = metadata.metadata("vllm-sweep")["Requires-Python"] or ""
        return [*check_python(platform.python_version(), sys.executable, wanted), *check_own(own_packages())]
    except metadata.PackageNotFoundError:
        return failure("packages", "vllm-sweep is not installed in this Python", _REMEDY)


def check_python(version: str, executable: str, wanted: str) -> list[Check]:
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("python", f"{version}, {executable}")
    return failure("python", f"{version}, {executable}", f"This program needs Python {wanted}.")


def check_own(packages: list[Package]) -> list[Check]:
    wrong = [told for package in packages if (told := _wrong(package)) is not None]
    if wrong:
        return failure("packages", "; ".join(wrong), _REMEDY)
    return ok("packages", f"{len(packages)} packages of its own, all in the versions that it needs")


def _wrong(package: Package) -> str | None:
    if package.version is None:
        return f"{package.name} is missing"
    if not package.importable:
        return f"{package.name} {package.version} cannot be imported"
    if not SpecifierSet(package.wanted).contains(package.version, prereleases=True):
        return f"{package.name} is {package.version}, not {package.wanted}"
    return None
