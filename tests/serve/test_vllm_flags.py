import json

import pytest
import yaml
from hypothesis import given, strategies as st

from sweep.serve.command_line import parse_command_line
from sweep.serve.vllm_flags import (
    OWNED,
    RULES,
    changes_answers,
    config_text,
    normalise,
    normalise_flags,
    refusal,
    to_config,
)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("max_num_seqs", "max-num-seqs"),
        ("--max-num-seqs", "max-num-seqs"),
        ("tp", "tensor-parallel-size"),
        ("device_memory_utilization", "gpu-memory-utilization"),
        ("compilation_config.cudagraph_mode", "compilation-config.cudagraph_mode"),
    ],
)
def test_normalise(given, name):
    assert normalise(given) == name


@pytest.mark.parametrize("owned", OWNED)
def test_what_the_sweep_sets_is_refused_in_any_spelling(owned):
    name = owned.replace("*", "certfile")
    assert refusal(name)
    assert refusal("--no_" + name.replace("-", "_"))


def test_remote_code_needs_consent():
    assert "allow_remote_code" in refusal("trust_remote_code")
    assert refusal("trust-remote-code", allow_remote_code=True) is None
    assert refusal("port", allow_remote_code=True)


def test_flags_that_change_answers():
    assert changes_answers("kv_cache_dtype")
    assert changes_answers("speculative-config.num_speculative_tokens")
    assert not changes_answers("block-size")


def test_normalise_flags():
    given = {"max_num_seqs": 8, "no-enable-prefix-caching": True, "compilation_config": {"mode": 3}}
    assert normalise_flags(given) == {
        "max-num-seqs": 8,
        "enable-prefix-caching": False,
        "compilation-config": {"mode": 3},
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_seqs": 1, "max-num-seqs": 2}, "given twice"),
        ({"enable-prefix-caching": True, "no-enable-prefix-caching": True}, "given twice"),
        ({"max-num-seqs": None}, "leave the line out"),
        ({"gpu-memory-utilization": float("nan")}, "finite"),
        ({"gpu-memory-utilization": "90%"}, "write 0.9"),
        ({"enable-prefix-caching": "False"}, "without quotes"),
        ({"dtype": "--trust-remote-code"}, "another flag"),
        ({"served-model-name": ["a", "--trust-remote-code"]}, "another flag"),
        ({"dtype": "half\n--x"}, "control characters"),
        ({"hf-overrides": {"a": float("inf")}}, "finite numbers"),
        ({"port": 80}, "every launch sets it"),
        ({"a b": 1}, "not the name"),
        ({"x": object()}, "quote it"),
    ],
)
def test_bad_flags_are_refused_with_the_fix(flags, words):
    with pytest.raises(ValueError, match=words):
        normalise_flags(flags)


def test_to_config_spells_what_vllm_reads():
    flags = {
        "enable-prefix-caching": False,
        "enable-chunked-prefill": True,
        "disable-log-stats": False,
        "dtype": None,
        "served-model-name": ["a", "b"],
        "lora-modules": [{"name": "x", "path": "/x"}],
        "allowed-origins": [],
        "hf-overrides": {"use_cache": False},
        "compilation-config.use_inductor": False,
        "gpu-memory-utilization": 0.9,
    }
    assert to_config("m", "abc", flags) == {
        "model": "m",
        "revision": "abc",
        "compilation-config.use_inductor": "false",
        "no-enable-prefix-caching": True,
        "enable-chunked-prefill": True,
        "gpu-memory-utilization": 0.9,
        "hf-overrides": {"use_cache": False},
        "lora-modules": ['{"name": "x", "path": "/x"}'],
        "served-model-name": ["a", "b"],
    }


scalars = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
flag_names = st.from_regex(r"[a-z]{2,8}(-[a-z]{2,8}){0,2}", fullmatch=True)


@given(
    st.dictionaries(flag_names, st.one_of(scalars, st.none(), st.lists(scalars), st.dictionaries(st.text(), scalars)))
)
def test_the_file_reads_back_and_holds_no_false_that_vllm_would_drop(flags):
    text = config_text("some/model", None, flags)
    read = yaml.safe_load(text)
    assert read == to_config("some/model", None, flags)
    assert not any(value is False or value is None or value == [] for value in read.values())
    assert text.startswith("model: some/model\n")


def test_a_pasted_command_line():
    # One backslash has a space behind it, which a shell would not forgive.
    line = parse_command_line(
        r"""
        CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen2.5-7B-Instruct \
            --max-num-seqs 256 --gpu-memory-utilization=0.92 \
            --no-enable-prefix-caching -tp 2 --enforce-eager -O3 \{space}
            --host 0.0.0.0 --port 8000 --api-key s3cret \
            --served-model-name a b --speculative-config '{"model": "x", "num_speculative_tokens": 3}' \
            --max-model-len 32k --seed -1 > serve.log 2>&1 &
        """.replace("{space}", " ")
    )
    assert line.model == "Qwen/Qwen2.5-7B-Instruct"
    assert line.flags == {
        "max-num-seqs": 256,
        "gpu-memory-utilization": 0.92,
        "enable-prefix-caching": False,
        "tensor-parallel-size": 2,
        "enforce-eager": True,
        "optimization-level": 3,
        "served-model-name": ["a", "b"],
        "speculative-config": {"model": "x", "num_speculative_tokens": 3},
        "max-model-len": "32k",
        "seed": -1,
    }
    assert line.dropped == ("--host", "--port", "--api-key")


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        ("vllm serve --enable-chunked-prefill org/m --seed 1", "org/m", {"enable-chunked-prefill": True, "seed": 1}),
        ("python -m vllm.entrypoints.openai.api_server --model org/m --dtype half", "org/m", {"dtype": "half"}),
        ("vllm serve org/m", "org/m", {}),
        ("vllm serve --seed 1", None, {"seed": 1}),
        ("vllm serve org/m --enable-chunked-prefill=false", "org/m", {"enable-chunked-prefill": False}),
    ],
)
def test_command_lines_of_other_shapes(text, model, flags):
    line = parse_command_line(text)
    assert (line.model, line.flags) == (model, flags)


@pytest.mark.parametrize("text", ["", "python train.py", "vllm serve 'org/m"])
def test_what_is_no_command_line_is_said(text):
    with pytest.raises(ValueError, match=r"vllm serve|command line"):
        parse_command_line(text)


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        line = parse_command_line(f"vllm serve {text}")
    except ValueError:
        return
    json.dumps(line.flags)


def test_rules_name_flags_in_their_canonical_spelling():
    names = {word for rule in RULES for word in rule.replace("(", " ").split() if word[0].isalpha() and word != "or"}
    assert names
    assert all(normalise(name) == name and refusal(name) is None for name in names)
