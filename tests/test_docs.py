"""The documents are checked against the code: every key is described, and nothing is described that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from sweep.cli import main
from sweep.config import SweepConfig
from sweep.load.workload import LoadSection
from sweep.search.objectives import Objective

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def keys(model: type[BaseModel], prefix: str = "", seen: set[type[BaseModel]] | None = None) -> Iterator[str]:
    """Yield the keys that a section takes; the keys of a section that stands in several places once."""
    seen = {Objective} if seen is None else seen
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        parts = [part for part in members(field.annotation) if part is not type(None)]
        inner = [section for part in parts if (section := section_of(part)) is not None and section not in seen]
        if len(inner) < len(parts):
            yield key  # it takes a value as well
        for section in inner:
            seen.add(section)
            yield from keys(section, f"{key}.", seen)


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, whatever is annotated to them."""
    if get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif get_origin(annotation) in {Union, UnionType}:
        for part in get_args(annotation):
            yield from members(part)
    else:
        yield annotation


def section_of(part: Any) -> type[BaseModel] | None:
    inner = get_args(part)[0] if get_origin(part) is tuple else part
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def test_every_key_of_a_search_space_is_described_and_no_other() -> None:
    text = (ROOT / "docs" / "search-space.md").read_text()
    described = set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))
    assert described == set(keys(SweepConfig))


def test_the_examples_of_a_load_are_loads() -> None:
    text = (ROOT / "docs" / "search-space.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(load:\n.*?)```", text, re.DOTALL)]
    assert [LoadSection.model_validate(block["load"]).kinds[0].name for block in blocks] == ["chat"]
    base: dict[str, Any] = {"rate": 1, "prompt": {"tokens": 8}, "output": {"tokens": 8}}
    shapes = re.findall(r"^((?:prompt|output|rate|concurrency): [^#\n]*)", text, re.MULTILINE)
    assert len(shapes) == 7
    for line in shapes:
        key, value = next(iter(yaml.safe_load(line).items()))
        loop = {} if key != "concurrency" else {"rate": None}
        LoadSection.model_validate(base | loop | {key: value, "seconds": 9})


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
