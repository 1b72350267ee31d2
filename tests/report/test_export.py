from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from sweep.report.export import best_config_yaml, write_best_config
from tests.report.studies import complete, missed, study, typical

CONFIG = {"model": "org/model", "max-num-seqs": 64, "no-enable-prefix-caching": True, "gpu-memory-utilization": 0.9}


def text(view=None, trial: int = 1, config=CONFIG, env=None, check: str = "parsed by vLLM's own parser") -> str:
    return best_config_yaml(view or typical(), trial, config, env=env or {}, check=check)


def test_the_content_is_the_configuration_and_nothing_else() -> None:
    assert yaml.safe_load(text()) == CONFIG


def test_the_header_says_where_it_comes_from() -> None:
    header = text()
    for fact in (
        "demo, trial 1",
        "0.32.0",
        "NVIDIA H200",
        "org/model, revision abc123",
        "480 tok/s (20.0 % better than the baseline's 400 tok/s)",
        "prompts of 1,024 tokens",
        "TTFT p99 <= 500 ms",
        "vllm serve --config best_config.yaml",
        "parsed by vLLM's own parser",
    ):
        assert fact in header
    assert "false" not in header


def test_environment_variables_are_named_and_secrets_keep_their_value() -> None:
    header = text(env={"NCCL_DEBUG": "WARN", "HF_TOKEN": "hf_canary", "LIST": "a b"})
    assert "export NCCL_DEBUG=WARN" in header
    assert "export LIST='a b'" in header
    assert "export HF_TOKEN=..." in header
    assert "hf_canary" not in header


def test_a_nearest_miss_says_so_and_by_how_much() -> None:
    header = text(missed())
    assert "No trial met the SLOs" in header
    assert "TTFT p99 is 600 ms, the limit is 500 ms (+20.0 %)" in header


def test_the_baseline_as_the_best_is_no_gain() -> None:
    assert "is the baseline" in text(study(complete(0, {}, label="baseline")), trial=0)


@pytest.mark.parametrize("value", [False, None])
def test_what_vllm_would_misread_is_a_bug_of_the_caller(value: object) -> None:
    with pytest.raises(ValueError, match="enable-prefix-caching"):
        text(config={"enable-prefix-caching": value})


@given(st.text(max_size=30).map(lambda end: f"x\nmodel: evil\r\u2028\x85seed: 1 {end}"))
def test_no_name_can_leave_the_comment(hostile: str) -> None:
    view = study(complete(1, {}, label=hostile), name=hostile, model=hostile, device=hostile, revision=hostile)
    written = text(view, env={"A": hostile}, check=hostile)
    assert yaml.safe_load(written) == CONFIG
    assert all(line.startswith("#") for line in written.splitlines()[: -len(CONFIG)])


def test_it_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "best_config.yaml"
    path.write_text("old")
    write_best_config(path, typical(), 1, CONFIG, env={}, check="not checked: vLLM is not installed here")
    assert yaml.safe_load(path.read_text()) == CONFIG
    assert [entry.name for entry in tmp_path.iterdir()] == ["best_config.yaml"]
