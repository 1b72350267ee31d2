"""The card against figures computed by hand, against real files, and against files that are not as they should be."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sweep.memory.architecture import read_architecture
from sweep.memory.card import ModelCard, card_of, read_card
from sweep.memory.estimate import estimate
from sweep.memory.pool import pool_of
from sweep.memory.weights import read_weights
from sweep.model import DeviceMemory

CONFIGS = Path(__file__).parent / "configs"
DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in DOCUMENT.splitlines() if line.startswith("| `")
]
ROWS = [row for row in ROWS if (CONFIGS / f"{row[0]}.json").is_file()]
SUMS = re.findall(r"^(\S+) +(parameters|kv) = (.+)$", DOCUMENT, re.MULTILINE)


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def card(name: str) -> ModelCard:
    return card_of(name, config(name))


def test_every_config_stands_in_the_document_with_its_sums() -> None:
    names = {path.stem for path in CONFIGS.glob("*.json")}
    assert {row[0] for row in ROWS} == names
    assert {(name, what) for name, what, _ in SUMS} == {(name, what) for name in names for what in ("parameters", "kv")}


@pytest.mark.parametrize(("name", "what", "formula"), SUMS, ids=[f"{name} {what}" for name, what, _ in SUMS])
def test_sums_written_out_by_hand(name: str, what: str, formula: str) -> None:
    assert re.fullmatch(r"[\d+* ()]+", formula)
    value = eval(formula, {"__builtins__": {}})
    pool = pool_of(card(name), {})
    assert pool is not None
    assert value == (card(name).parameters if what == "parameters" else pool.token_bytes)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_table_of_the_document(row: list[str]) -> None:
    name, attention, parameters, weights, token, beyond = row
    known = card(name)
    pool = pool_of(known, {})
    layers = known.architecture.layers
    assert pool is not None
    assert layers is not None
    assert known.architecture.attention == attention
    assert known.parameters == number(parameters)
    assert pool.token_bytes == number(token)
    assert sum(2 * x.kv_heads * x.elements for x in layers if x.window_tokens is None) == number(beyond)
    if weights.startswith("about"):
        assert known.loaded_bytes() == pytest.approx(float(weights.split()[1]), rel=0.01)
    else:
        assert known.loaded_bytes() == number(weights)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_windows_stand_where_the_config_has_them() -> None:
    def windows(name: str, **changes: Any) -> list[int | None]:
        layers = read_architecture({**config(name), **changes}).layers
        assert layers is not None
        return [layer.window_tokens for layer in layers]

    assert windows("mistral-7b-v0.1") == [4096] * 32
    assert windows("mistral-7b-v0.3") == [None] * 32
    assert windows("gemma-2-9b") == [4096, None] * 21
    assert windows("gemma-3-12b") == ([1024] * 5 + [None]) * 8
    assert windows("gpt-oss-20b") == [128, None] * 12
    assert windows("qwen2.5-7b") == [None] * 28
    assert windows("qwen2.5-7b", use_sliding_window=True, max_window_layers=20) == [None] * 20 + [131072] * 8
    assert windows("qwen2.5-7b", use_sliding_window=True, layer_types=["full_attention"] * 28) == [None] * 28


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_num_value_heads": 32},
        {"mamba_d_state": 128},
        {"layer_types": ["linear_attention", "full_attention"] * 16},
        {"index_topk": 2048},
        {"num_kv_shared_layers": 10},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_cache_that_is_not_known_is_said_to_be(changes: dict[str, Any]) -> None:
    known = card_of("x", {**config("llama-3.1-8b"), **changes})
    assert known.architecture.layers is None
    assert known.architecture.unknown
    assert pool_of(known, {}) is None


def test_heads_of_kinds() -> None:
    for heads, kind in ((32, "MHA"), (8, "GQA"), (1, "MQA")):
        known = card_of("x", {**config("llama-3.1-8b"), "num_key_value_heads": heads})
        assert known.architecture.attention == kind
    plain = {key: value for key, value in config("llama-3.1-8b").items() if key != "num_key_value_heads"}
    assert card_of("x", plain).architecture.attention == "MHA"


def write_model(folder: Path, tensors: dict[str, tuple[str, list[int], int]], name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor, (dtype, shape, size) in tensors.items():
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    # Only the header is read: the tensors' bytes need not be there.
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)


def test_weights_are_those_of_the_headers(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": ("F32", [10, 10], 400), "b": ("BF16", [7], 14), "c": ("I8", [3], 3)})
    (tmp_path / "config.json").write_text(json.dumps(config("tiny-qwen2")))
    known = read_card(str(tmp_path))
    assert known is not None
    assert (known.weight_bytes, known.weights_from, known.parameters) == (417, "files", 110)
    assert known.loaded_bytes() == 217  # floats in 16 bits, the rest as it is
    assert known.loaded_bytes("float32") == 431


def test_an_index_names_the_files_and_stands_in_for_them(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 999}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(tmp_path) == (999, None)
    write_model(tmp_path, {"a": ("F16", [4], 8)}, "m-1.safetensors")
    write_model(tmp_path, {"b": ("F16", [5], 10)}, "m-2.safetensors")
    write_model(tmp_path, {"all": ("F16", [9], 18)}, "consolidated.safetensors")
    assert read_weights(tmp_path) == (18, {"F16": 9})


def test_a_model_in_the_hub_cache(tmp_path: Path) -> None:
    stored = tmp_path / "hub" / "models--some--model"
    for commit in ("c0ffee", "f00d"):
        write_model(stored / "snapshots" / commit, {"a": ("F16", [4], 8)})
        (stored / "snapshots" / commit / "config.json").write_text(json.dumps(config("tiny-qwen2")))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("c0ffee\n")
    for env in ({"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": ""}):
        for revision in (None, "main", "f00d"):
            assert read_card("some/model", revision, env) is not None
        assert read_card("some/model", "gone", env) is None
        assert read_card("some/other", None, env) is None
        assert read_card("../model", None, env) is None


def test_the_tiny_model_is_exact_where_it_has_been_made() -> None:
    folder = Path(__file__).resolve().parents[2] / "results" / ".cache" / "tiny-qwen2"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the tiny model has not been made")
    known = read_card(str(folder))
    assert known is not None
    assert known.parameters == known.architecture.parameters == card("tiny-qwen2").parameters
    header = 8 + struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
    assert known.weight_bytes == (folder / "model.safetensors").stat().st_size - header
    # vLLM 0.32 logs 524,288 tokens for a cache of 1 GiB.
    pool = pool_of(known, {}, block_tokens=128)
    assert pool is not None
    assert pool.capacity(2**30, 2048, 2 * 2048)[0] == 524_288


@given(st.binary(max_size=200))
def test_any_bytes_make_no_card_and_no_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).write_bytes(data)
    assert read_card(str(folder)) is None
    assert read_weights(folder) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.sampled_from([10**30, -(10**400), 10**400])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_no_value_in_a_config_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    known = config(data.draw(st.sampled_from(sorted(path.stem for path in CONFIGS.glob("*.json")))))
    for key in data.draw(st.lists(st.sampled_from(sorted(known)), max_size=3)):
        known[key] = data.draw(JSON)
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(known))
    found = read_card(str(folder))
    if found is not None:
        pool_of(found, {"tensor-parallel-size": 2})
        for memory in (None, DeviceMemory(24 * 2**30, 23 * 2**30, "nvml")):
            estimate(found, {"max-num-seqs": 64}, memory)


ENTRY: dict[str, Any] = {"dtype": "BF16", "shape": [10, 10], "data_offsets": [0, 200]}


@pytest.mark.parametrize("kind", ["C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "F2_OF_TOMORROW"])
def test_types_of_tensors_are_known_or_said_not_to_be(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path, {"a": (kind, [10, 10], 200)})
    (tmp_path / "config.json").write_text(json.dumps(config("tiny-qwen2")))
    known = read_card(str(tmp_path))
    assert known is not None
    assert (known.elements is None) == (kind == "F2_OF_TOMORROW")
    assert known.loaded_bytes() > 0


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "BF16", "shape": [1e999], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [NaN], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [-4], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 1e999]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [5, 0]}}',
        b'{"a": null}',
        b"[1, 2]",
        b'{"a":' * 100_000,
        b"\0" * 33_000_000,
    ],
    ids=lambda header: repr(header[:60]),
)
def test_damaged_headers_are_no_weights(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_weights(tmp_path) is None


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000, b'{"hidden_size": 1e999}', b"\xff", b"5", b""])
def test_damaged_configs_make_no_card(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert read_card(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_pipes_and_loops_are_not_waited_for(tmp_path: Path, name: str) -> None:
    for kind in ("pipe", "loop"):
        folder = tmp_path / kind
        folder.mkdir()
        if name != "config.json":
            (folder / "config.json").write_text(json.dumps(config("tiny-qwen2")))
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(folder / name)
        known = read_card(str(folder))
        assert (known is None) == (name == "config.json")
        assert known is None or known.weights_from == "architecture"


def test_names_that_cannot_be_names_make_no_card(tmp_path: Path) -> None:
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    env = {"HF_HUB_CACHE": str(tmp_path)}
    for name in ("a" * 300, "a/" + "b" * 300, "a\0b", "~nobody-here/x"):
        assert read_card(name, None, env) is None
    for cache in ({"HF_HOME": "~nobody-here/x", "HF_HUB_CACHE": ""}, {"HF_HUB_CACHE": "a\0b"}):
        assert read_card("a/b", None, cache) is None
    for text in (b"\xff\xfe", b"x" * 300):
        (refs / "main").write_bytes(text)
        assert read_card("a/b", None, env) is None
    assert read_card("a/b", "x" * 300, env) is None
