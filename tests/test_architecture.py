"""The shape of the code, held: who may import whom, one importer per heavy library, and modules that stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sweep"

# A package may import from those of lower rank only; siblings of one rank never import each other.
RANK = {
    "cli": 6,
    "run": 5,
    "report": 4,
    "progress": 4,
    "config": 3,
    "search": 2,
    "memory": 2,
    "serve": 2,
    "load": 2,
    "measure": 2,
    "section": 1,
    "yamlfile": 1,
    "text": 1,
    "slo": 1.5,
    "model": 0.5,
    "failure": 0,
    "errors": 0,
    "files": 0,
    "children": 0,
    "tiny_model": 0,
}
# run composes its own modules, and so does each package.
HEAVY = {
    "optuna": {"search/study.py"},
    "aiohttp": {"load/client.py", "load/wire.py", "measure/scrape.py", "serve/process.py"},
    "msgspec": {"load/sse.py", "load/wire.py"},
    "pandas": {"report/table.py"},
    "plotly": {"report/plots.py"},
    "jinja2": {"report/html.py"},
    "rich": {"progress.py", "cli.py"},
    "psutil": {"serve/process.py", "serve/device.py"},
    "pyarrow": {"run/records.py"},
    "prometheus_client": {"measure/prom.py"},
    "pynvml": {"serve/device.py"},
    "torch": {"tiny_model.py"},
    "transformers": {"tiny_model.py"},
    "vllm": {"serve/vllm_child.py"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def place(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports(path):
        if name.startswith("sweep."):
            other = place(name)
            assert other == own or RANK[other] < RANK[own], f"{own} imports {name}"


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from sweep.cli import main\nimport sweep.run.loop\n")
    assert {place(name) for name in imports(planted)} == {"cli", "run"}


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_have_known_importers(library: str) -> None:
    users = {
        str(path.relative_to(PACKAGE)) for path in MODULES if library in {name.split(".")[0] for name in imports(path)}
    }
    assert users <= HEAVY[library]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, sweep, sweep.cli;"
        "heavy = {'torch', 'vllm', 'optuna', 'pandas', 'plotly', 'aiohttp', 'pyarrow'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_no_path_of_this_machine_and_no_unfinished_work() -> None:
    for path in MODULES:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type in {tokenize.STRING, tokenize.COMMENT}:
                    assert str(ROOT) not in token.string, f"{path}: {token.string}"
        assert "NotImplementedError" not in path.read_text(encoding="utf-8"), path
