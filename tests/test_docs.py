"""The documents are checked against the code: every key is described, and nothing is described that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from sweep.cli import main
from sweep.config import SweepConfig
from sweep.search.objectives import Objective

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner: list[Any] = [field.annotation, *get_args(field.annotation)]
        section = next((t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if section is None or section is Objective:
            yield f"{prefix}{name}"
        else:
            yield from keys(section, f"{prefix}{name}.")


def test_every_key_of_a_search_space_is_described_and_no_other() -> None:
    text = (ROOT / "docs" / "search-space.md").read_text()
    described = set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))
    assert described == set(keys(SweepConfig))


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    if "results/" in str(page.relative_to(ROOT)) and page.name != "README.md":
        return
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_command_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert len(commands) >= 5
    for command in commands:
        assert f"`{command}" in readme
