"""Every way in which a YAML file can be wrong is told with its file and line, and nothing is guessed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sweep.errors import ConfigError
from sweep.yamlfile import read_yaml


def read(tmp_path: Path, text: str | bytes) -> dict[str, object]:
    path = tmp_path / "space.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path).data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "mapping"),
        ("just words\n", "mapping"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", ":3: 'a' stands twice (first on line 1)"),
        ("a:\n\tb: 1\n", ":2: not valid YAML"),
        ("a: [1, 2\n", "not valid YAML"),
        ("a: b: c\n", ":1: not valid YAML"),
        ("a: !!python/object/apply:os.system [echo]\n", ":1:"),
        ("a: &x 1\nb: *x\nc: &y [1]\nd: *y\n", "alias"),
        ("on: 1\n", ":1: 'on' would be read as true"),
        ("1: 1\n", "read as int"),
        ("a: 010\n", "octal"),
        ("a: 12:30:45\n", "45045"),
        ("a: 1_000\n", "1000"),
        ("a: 0x1F\n", "31"),
        ("a: off\n", "false"),
        ("a: 2026-01-01\n", "date"),
        ("a: \x00\n", "not valid YAML"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: " + "[" * 2000 + "]" * 2000 + "\n", "deep"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert expected in str(error.value)
    assert "space.yaml" in str(error.value)


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        read(tmp_path, b"a: \xff\n")


def test_bom_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\r\nb: yes it is\r\n") == {"a": 1, "b": "yes it is"}


def test_things_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="not a file"):
        read_yaml(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a file"):
        read_yaml(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="1 MiB"):
        read_yaml(tmp_path / "big")


def test_lines_are_known_for_keys_and_list_entries(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("a:\n  b:\n    - 1\n    - 2\nc: 3\n")
    file = read_yaml(path)
    assert file.where(("a", "b", 1)).endswith(":4")
    assert file.where(("c",)).endswith(":5")
    assert file.where(("c", "absent")).endswith(":5")


@given(st.binary(max_size=200))
def test_no_input_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data)
    with suppress(ConfigError):
        assert isinstance(read_yaml(path).data, dict)
