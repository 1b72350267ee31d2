import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sweep.search.rules import Rule
from sweep.serve.command_line import parse_command_line
from sweep.serve.flag_catalogue import Catalogue, FlagSpec, cache_folder, kept_catalogue, read_catalogue
from sweep.serve.flag_history import REMOVED
from sweep.serve.kind import ServeSection
from sweep.serve.vllm_flags import (
    ONLY_ON,
    OWNED,
    PLATFORM_RULES,
    QUALITY,
    RULES,
    normalise,
    refusal,
)

FAKE = Path(__file__).parents[1] / "fakes" / "installed"
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]

# The names of a flag are a list.
SEED = {"names": "seed", "kind": "value", "type": "int", "choices": None, "default": None, "or_none": False}


def serve(package: Path = FAKE, **env: str) -> ServeSection:
    return ServeSection.model_validate(
        {"model": "org/model", "command": COMMAND, "env": {"PYTHONPATH": str(package), **env}}
    )


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    found = asyncio.run(read_catalogue(serve(), tmp_path_factory.mktemp("flags")))
    assert found is not None
    return found


def test_flags_are_as_the_parser_has_them(catalogue):
    assert catalogue.version == "0.99.0"
    assert catalogue.find("tp").names == ("tensor-parallel-size", "tp")
    assert catalogue.find("max-num-seqs") == FlagSpec(("max-num-seqs",), "value", "int", or_none=True)
    assert catalogue.find("max-num-batched-tokens").type == "size"
    assert catalogue.find("enable-prefix-caching").kind == "toggle"
    assert catalogue.find("disable-log-stats").kind == "switch"
    assert catalogue.find("cudagraph-capture-sizes").kind == "list"
    assert catalogue.find("scheduling-policy").choices == ("fcfs", "priority")
    assert catalogue.find("gpu-memory-utilization").default == "0.9"
    assert catalogue.find("compilation-config.mode").type == "other"
    assert catalogue.find("model-tag") is None


def test_vllm_is_imported_once_and_again_after_an_edit(tmp_path):
    package, kept, log = tmp_path / "site", tmp_path / "kept", tmp_path / "imports"
    shutil.copytree(FAKE, package)
    section = serve(package, FAKE_VLLM_IMPORTS=str(log))
    log.touch()

    def imports():
        return len(log.read_text().splitlines())

    assert asyncio.run(kept_catalogue(section, kept)) is None
    assert imports() == 0
    first = asyncio.run(read_catalogue(section, kept))
    again = asyncio.run(read_catalogue(section, kept))
    assert (first.kept, again.kept, imports()) == (False, True, 1)
    assert first.flags == again.flags
    assert asyncio.run(kept_catalogue(section, kept)).flags == first.flags

    source = package / "vllm" / "engine" / "arg_utils.py"
    source.write_text(source.read_text() + "# one more flag\n")
    assert asyncio.run(kept_catalogue(section, kept)) is None
    assert asyncio.run(read_catalogue(section, kept)).kept is False
    assert imports() == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": 0}',
        b'{"format": 2, "vllm_version": "1", "flags": 3}',
        b'{"format": 2, "vllm_version": "1", "flags": []}',
        b'{"format": 2, "vllm_version": "1", "flags": [3]}',
        b'{"format": 2, "vllm_version": "1", "flags": [{}]}',
        json.dumps({"format": 2, "vllm_version": "1", "flags": [SEED]}).encode(),
    ],
)
def test_a_broken_file_is_read_anew(tmp_path, content):
    asyncio.run(read_catalogue(serve(), tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert asyncio.run(kept_catalogue(serve(), tmp_path)) is None
    assert asyncio.run(read_catalogue(serve(), tmp_path)).kept is False
    assert asyncio.run(kept_catalogue(serve(), tmp_path)).kept is True


def test_a_pipe_is_not_waited_for(tmp_path):
    asyncio.run(read_catalogue(serve(), tmp_path))
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert asyncio.run(kept_catalogue(serve(), tmp_path)) is None
    assert asyncio.run(read_catalogue(serve(), tmp_path)).kept is False
    assert asyncio.run(kept_catalogue(serve(), tmp_path)).kept is True


def test_what_plugins_may_add_is_part_of_what_is_kept(tmp_path):
    package, kept = tmp_path / "site", tmp_path / "kept"
    shutil.copytree(FAKE, package)
    asyncio.run(read_catalogue(serve(package), kept))
    assert asyncio.run(kept_catalogue(serve(package, VLLM_PLUGINS="mine"), kept)) is None
    plugin = package / "plugin-1.0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[console_scripts]\nmine = mine:main\n")
    assert asyncio.run(kept_catalogue(serve(package), kept)) is not None
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = mine:register\n")
    assert asyncio.run(kept_catalogue(serve(package), kept)) is None
    asyncio.run(read_catalogue(serve(package), kept))
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.1\n")
    assert asyncio.run(kept_catalogue(serve(package), kept)) is None


def test_flags_are_kept_below_an_absolute_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/vllm-sweep/flags")
    monkeypatch.setenv("HOME", "/home/me")
    for nowhere in ("cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", nowhere)
        assert cache_folder() == Path("/home/me/.cache/vllm-sweep/flags")


def test_without_a_home_nothing_is_kept():
    """A user without a name has no home when HOME is not set."""
    code = (
        "import pwd, asyncio\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "from sweep.serve.flag_catalogue import cache_folder, kept_catalogue, read_catalogue\n"
        "from sweep.serve.kind import ServeSection\n"
        f"serve = ServeSection(model='m', command={COMMAND!r}, env={{'PYTHONPATH': {str(FAKE)!r}}})\n"
        "assert cache_folder() is None\n"
        "assert asyncio.run(read_catalogue(serve)).kept is False\n"
        "assert asyncio.run(kept_catalogue(serve)) is None\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in {"HOME", "XDG_CACHE_HOME"}}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60, cwd=Path(__file__).parents[2])


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert asyncio.run(read_catalogue(serve(), tmp_path / "file" / "flags")).kept is False


def test_without_vllm_there_are_no_flags(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    assert asyncio.run(read_catalogue(serve(tmp_path), tmp_path / "kept")) is None
    other = ServeSection.model_validate({"model": "org/model", "command": ["/bin/true"]})
    assert asyncio.run(read_catalogue(other, tmp_path / "kept")) is None
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max-num-sequences", "no such flag (did you mean 'max-num-seqs'?)"),
        ("nonsense", "vLLM 0.99.0 has no such flag"),
        ("max-num-se", "beginning of a flag's name: write max-num-seqs"),
        ("max-num", "write max-num-seqs or max-num-batched-tokens"),
        ("device-memory-utilization", "another name of gpu-memory-utilization"),
        ("tp", "another name of tensor-parallel-size"),
        ("no-enable-prefix-caching", "write enable-prefix-caching, with the values true and false"),
        ("swap-space", "no such flag any more: gone since ~0.18"),
        ("cuda-graph-sizes", "write cudagraph-capture-sizes"),
        ("compilation-confg.mode", "did you mean 'compilation-config'?"),
        ("max-num-seqs.mode", "holds no options of its own"),
    ],
)
def test_wrong_names_come_with_the_right_one(catalogue, name, words):
    assert words in catalogue.name_problem(name)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz-.", max_size=30))
def test_only_exact_names_pass(name):
    known = Catalogue("1", (FlagSpec(("a-flag", "short"), "value", "int"), FlagSpec(("b",), "value", "other")))
    assert (known.name_problem(name) is None) == (name == "a-flag" or name.partition(".")[0] == "b")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max-num-seqs", 8.5, "takes a whole number, not 8.5"),
        ("max-num-seqs", "many", "takes a whole number"),
        ("max-num-seqs", "none", "takes a whole number"),
        ("block-size", "None", "takes a whole number"),
        ("max-num-seqs", True, "takes a whole number, not true"),
        ("max-num-seqs", [1, 2], "takes one value, not a list"),
        ("max-num-seqs", {"a": 1}, "not a mapping"),
        ("max-num-batched-tokens", "2.5K", "or one such as 4k"),
        ("gpu-memory-utilization", "much", "takes a number"),
        ("enable-prefix-caching", "yes", "true or false"),
        ("enable-prefix-caching", 1, "true or false"),
        ("scheduling-policy", "prio", "did you mean 'priority'?"),
        ("scheduling-policy", "lifo", "allowed are fcfs, priority"),
        ("cudagraph-capture-sizes", [1, "x"], 'a whole number, not "x"'),
        ("headless", False, "has no negative form"),
        ("compilation-config", [1], "write it as JSON in quotes"),
    ],
)
def test_wrong_values(catalogue, name, value, words):
    assert words in catalogue.value_problem(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max-num-seqs", 8),
        ("max-num-seqs", "8"),
        ("max-num-seqs", "None"),
        ("max-num-batched-tokens", "4k"),
        ("max-num-batched-tokens", "4K"),
        ("gpu-memory-utilization", 1),
        ("enable-prefix-caching", False),
        ("disable-log-stats", False),
        ("scheduling-policy", "fcfs"),
        ("cudagraph-capture-sizes", [1, 2]),
        ("cudagraph-capture-sizes", 1),
        ("compilation-config", {"mode": 3}),
        ("compilation-config", '{"mode": 3}'),
        ("compilation-config.mode", True),
    ],
)
def test_right_values(catalogue, name, value):
    assert catalogue.name_problem(name) is None
    assert catalogue.value_problem(name, value) is None


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    section = ServeSection.model_validate({"model": "org/model", "command": COMMAND})
    return asyncio.run(read_catalogue(section, tmp_path_factory.mktemp("flags")))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs an installed vLLM")
def test_what_is_written_here_of_flags_is_true_of_the_installed_vllm(installed):
    if not installed.version.startswith("0.32."):
        pytest.skip(f"the tables are of vLLM 0.32, not {installed.version}")
    ruled = {name for text in (*RULES, *sum(PLATFORM_RULES.values(), ())) for name in Rule.parse(text).names}
    exact = {name for name in OWNED if not name.endswith("*")} | QUALITY | ONLY_ON | ruled
    assert {name: problem for name in exact if (problem := installed.name_problem(name))} == {}
    assert [name for name in REMOVED if installed.find(name)] == []
    assert [spec for spec in installed.flags if spec.kind == "switch" and not refusal(spec.name)] == [
        spec for spec in installed.flags if spec.name in ONLY_ON
    ]
    for spec in installed.flags:
        model, words = ("org/m", "") if spec.kind in {"switch", "toggle"} else (None, "x")
        if not refusal(spec.name, allow_remote_code=True) and spec.name != "optimization-level":
            line = parse_command_line(f"vllm serve --{spec.name} {words} {model or ''}")
            assert (line.model, list(line.flags)) == (model, [spec.name])
    # Whatever alias a pasted command line has, it is read as the flag that it is.
    others = {name: spec.name for spec in installed.flags for name in spec.names[1:] if not refusal(spec.name)}
    assert {name: normalise(name) for name in others} == others
