"""What is known before a launch, found out from a made-up vLLM that child processes import."""

from __future__ import annotations

import asyncio
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sweep.config import SweepConfig, load_config
from sweep.errors import ConfigError, MachineError
from sweep.run.check import check_document, check_text
from sweep.run.flag_check import load_space
from sweep.run.preflight import Preflight, known_before, preflight
from sweep.run.value_check import ValueCheck, _blamed, _spread, platform_rules
from sweep.tiny_model import make

FAKE = Path(__file__).parents[1] / "fakes" / "installed"
KNOWN = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "tensor-parallel-size",
    "block-size",
    "quantization",
    "config",
    "seed",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def space(
    tmp_path: Path,
    params: str,
    *,
    args: str = "",
    search: str = "",
    env: str = "",
    model: str = "m",
    package: Path = FAKE,
) -> SweepConfig:
    path = tmp_path / "space.yaml"
    path.write_text(f"""\
serve:
  model: {model}
  command: [{sys.executable}, -m, vllm.entrypoints.openai.api_server]
  env: {{PYTHONPATH: {package}, FAKE_VLLM_IMPORTS: {tmp_path / "imports"}{env}}}
  args: {{{args}}}
load: {{concurrency: 2, prompt: {{tokens: 10}}, output: {{tokens: 5}}, requests: 10}}
search:
  {search}
  params:
{params}
""")
    (tmp_path / "imports").touch()
    return load_config(path)


def asked(tmp_path: Path, params: str, **more: Any) -> Preflight:
    return asyncio.run(preflight(space(tmp_path, params, **more)))


def imports(tmp_path: Path) -> int:
    return len((tmp_path / "imports").read_text().splitlines())


def test_all_wrong_flags_are_told_at_once_and_before_vllm_is_imported(tmp_path):
    config = space(
        tmp_path,
        """\
    max_num_sequences: [1, 2]
    block-siz: [16]
    scheduling-policy:
      - fcfs
      - lifo
    max-num-seqs: {low: 0.5, high: 4, step: 0.5}
""",
        args="swap-space: 4, compilation-config.level: 3, tensor-parallel-size: two",
        search="baseline: {tp: 2}\n  enqueue: [{no-enable-prefix-caching: true}, {enable-prefix-caching: 1}]",
    )
    name = config._document.path
    # serve.args may use short names and `no-`, which are written out when they are read.
    expected = [
        f"{name}:5: serve.args.swap-space: vLLM 0.99.0 has no such flag any more",
        f"{name}:5: serve.args.tensor-parallel-size: takes a whole number",
        f"{name}:8: search.baseline.tp: is another name of tensor-parallel-size",
        f"{name}:9: search.enqueue.0.no-enable-prefix-caching: is the negative form of a flag",
        f"{name}:9: search.enqueue.1.enable-prefix-caching: takes no value but true or false",
        f"{name}:11: search.params.max-num-sequences: vLLM 0.99.0 has no such flag (did you mean 'max-num-seqs'?)",
        f"{name}:12: search.params.block-siz: is the beginning of a flag's name: write block-size",
        f'{name}:15: search.params.scheduling-policy.1: cannot be "lifo"; allowed are fcfs, priority',
        f"{name}:16: search.params.max-num-seqs: takes a whole number, not 0.5",
    ]
    for read in range(2):
        with pytest.raises(ConfigError) as caught:
            asyncio.run(preflight(config))
        lines = str(caught.value).splitlines()
        assert [line.startswith(start) for line, start in zip(lines, expected, strict=True)] == [True] * len(expected)
        # The flags that were kept may be older than a plugin: nothing is refused for their sake alone.
        assert imports(tmp_path) == 1 + read


def test_each_value_is_tried_with_the_baselines_other_flags(tmp_path):
    found = asked(
        tmp_path,
        """\
    tensor-parallel-size: [1, 2, 3, 4]
    max-num-seqs: [16, 64, 128, 4096]
    max-num-batched-tokens: [8, 256]
    uvicorn-log-level: [info, error]
    disable-log-stats: [true, false]
    enable-prefix-caching: [true, false]
""",
        search="baseline: {max-num-batched-tokens: 512}",
        env=", FAKE_VLLM_PLATFORM: cuda",
    )
    assert (found.vllm_version, found.platform, found.rules) == ("0.99.0", "cuda", ())
    assert found.resolved["max-num-seqs"] == 32
    (three,) = [check for check in found.alone["tensor-parallel-size"] if check.error]
    assert three == ValueCheck(3, "Total number of attention heads (4) must be divisible by tensor parallel size (3)")
    assert found.same_config("tensor-parallel-size") == ((1,), (2,), (4,))
    # 4096 is refused only beside 512 tokens, and 8 only beside 32 sequences: neither is impossible.
    assert found.same_config("max-num-seqs") == ((16,), (64, 128))
    assert found.alone["max-num-seqs"][3] == ValueCheck(4096)
    assert found.alone["max-num-batched-tokens"][0] == ValueCheck(8)
    # What the engine's configuration does not show is not known; nothing is said of it.
    assert found.same_config("uvicorn-log-level") == found.same_config("disable-log-stats") == ()
    assert found.same_config("enable-prefix-caching") == ((True,), (False,))
    assert found.alone["enable-prefix-caching"][1].changes == {"cache_config.enable_prefix_caching": "false"}
    assert found.refused({"tensor-parallel-size": 3, "max-num-seqs": 16}) == (
        "vLLM refuses tensor-parallel-size 3: Total number of attention heads (4) must be divisible by tensor parallel"
        " size (3)"
    )
    assert found.refused({"tensor-parallel-size": 2, "max-num-seqs": 4096}) is None
    (note,) = found.notes
    assert note.startswith("search.params.tensor-parallel-size: vLLM refuses 3: Total number of attention heads (4)")
    assert note.endswith("Such configurations are skipped.")


def test_what_is_alike_beside_the_baseline_has_to_be_alike_beside_the_other_values(tmp_path):
    one, other = '{"mode": 0}', '{"mode": 3}'
    swept = f"    compilation-config: ['{one}', '{other}']\n    max-num-seqs: [16, 64, 128]\n"
    for eager, groups in (("    enforce-eager: [true, false]\n", ((one,), (other,))), ("", ((one, other),))):
        found = asked(tmp_path, swept + eager, search="baseline: {enforce-eager: true}")
        assert found.same_config("compilation-config") == groups
        assert found.same_config("max-num-seqs") == ((16,), (64, 128))


def test_of_what_is_too_much_to_ask_nothing_is_said(tmp_path):
    """Each of two groups of twenty would be asked about beside some twelve values of the other flags."""
    others = "\n".join(
        f"    {name}: {values}"
        for name, values in (
            ("dtype", "[bfloat16, float32]"),
            ("quantization", "[awq, gguf]"),
            ("scheduling-policy", "[fcfs, priority]"),
            ("block-size", "[32, 64]"),
            ("gpu-memory-utilization", "[0.5, 0.6]"),
        )
    )
    seqs = "    max-num-seqs: {low: 64, high: 83, step: 1}"
    modes = ", ".join(f"'{{\"mode\": {number}}}'" for number in range(20))
    baseline = "allow_quality_change: true\n  baseline: {enforce-eager: true}"
    found = asked(tmp_path, f"{seqs}\n    compilation-config: [{modes}]\n{others}", search=baseline)
    assert found.same_config("max-num-seqs") == (tuple(range(64, 84)),)
    assert found.same_config("compilation-config") == ()
    assert found.alone["compilation-config"][0] == ValueCheck('{"mode": 0}')
    found = asked(tmp_path, f"    compilation-config: [{modes}]\n    block-size: [32, 64]", search=baseline)
    assert len(found.same_config("compilation-config")[0]) == 20


@pytest.mark.parametrize(
    ("given", "forbidden"),
    [
        ({"params": "    quantization: [awq, fp8, gptq]\n    dtype: [float32, bfloat16]"}, ["gptq"]),
        ({"params": "    quantization: [awq, fp8, gptq]\n    block-size: [32, 64]"}, ["fp8", "gptq"]),
        ({"params": "    quantization: [awq, fp8, gptq]"}, ["fp8", "gptq"]),
        (
            {
                "params": "    quantization: [awq, fp8, gptq]\n    block-size: [32, 64]",
                "enqueue": "[{dtype: bfloat16}]",
            },
            ["gptq"],
        ),
    ],
)
def test_a_value_is_forbidden_only_if_it_is_refused_beside_the_other_values_too(tmp_path, given, forbidden):
    search = f"allow_quality_change: true\n  baseline: {{dtype: float32}}\n  enqueue: {given.get('enqueue', [])}"
    found = asked(tmp_path, given["params"], search=search)
    assert [check.value for check in found.alone["quantization"] if check.error] == forbidden
    assert (found.refused({"quantization": "fp8", "dtype": "bfloat16"}) is not None) == ("fp8" in forbidden)
    here = [note for note in found.notes if "beside the baseline's other flags vLLM refuses fp8: torch.float32" in note]
    assert bool(here) == ("fp8" not in forbidden)


def test_where_nothing_is_in_doubt_vllm_is_asked_once(tmp_path):
    asked(tmp_path, "    max-num-seqs: [8, 16]\n    block-size: [32, 64]")
    assert imports(tmp_path) == 2  # its flags, and the values
    asked(tmp_path, "    max-num-seqs: [64, 128]\n    block-size: [32, 64]")
    assert imports(tmp_path) == 4


def test_a_flag_that_a_plugin_adds_is_no_error(tmp_path):
    """Its package was installed in a way that nothing tells of, after the flags were read."""
    site = tmp_path / "site"
    shutil.copytree(FAKE, site)
    asked(tmp_path, "    max-num-seqs: [8, 16]", package=site)
    cli = site / "vllm" / "entrypoints" / "cli" / "serve.py"
    changed = cli.read_text().replace("def cmd_init", "from plugin import Serve\n\n\ndef cmd_init")
    state = cli.stat()
    cli.write_text(changed)
    (site / "plugin.py").write_text(
        "from vllm.entrypoints.cli import serve as real\n\n\nclass Serve(real.Serve):\n"
        "    def subparser_init(self, subparsers):\n        super().subparser_init(subparsers)\n"
        "        subparsers.choices['serve'].add_argument('--of-the-plugin', type=int)\n"
    )
    (kept,) = (tmp_path / "cache" / "vllm-sweep" / "flags").iterdir()
    asked(tmp_path, "    max-num-seqs: [8, 16]", package=site)  # makes the name of the file for these sources
    (new,) = set(kept.parent.iterdir()) - {kept}
    new.write_bytes(kept.read_bytes())
    assert state.st_size != cli.stat().st_size
    found = asked(tmp_path, "    of-the-plugin: [8, 16]", package=site)
    assert (found.catalogue.kept, found.catalogue.find("of-the-plugin").type) == (False, "int")
    assert asked(tmp_path, "    of-the-plugin: [8, 16]", package=site).catalogue.kept is True


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("LocalEntryNotFoundError: An error happened while trying to locate the file", "the hub cannot be reached"),
        ("LocalEntryNotFoundError: outgoing traffic has been disabled", "HF_HUB_OFFLINE forbids to ask the hub"),
        ("We couldn't connect to 'https://huggingface.co' to load the files", "the hub cannot be reached"),
    ],
)
def test_a_model_that_cannot_be_had_is_no_fault_of_the_space(tmp_path, message, words):
    told = space(tmp_path, "    max-num-seqs: [8, 16]", env=f', FAKE_VLLM_NO_MODEL: "{message}"')
    with pytest.raises(MachineError) as caught:
        asyncio.run(preflight(told))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path / 'space.yaml'}:2: serve.model: the model's configuration could not be had: ")
    assert words in line
    assert "`check --offline`" in line
    assert "Correct" not in line
    assert check_document(told, ask_vllm=False)["catalogue"]["kept"] is True


def test_a_model_that_is_not_in_the_hub_is(tmp_path):
    told = space(tmp_path, "    max-num-seqs: [8, 16]", env=', FAKE_VLLM_NO_MODEL: "RepositoryNotFoundError: 404 m"')
    with pytest.raises(MachineError, match=r"serve\.model: vLLM refuses this: .*\nCorrect serve\.model"):
        asyncio.run(preflight(told))


def test_a_broken_model_is_told_at_the_model(tmp_path):
    model = tmp_path / "model"
    make(model)
    (model / "config.json").write_text("{bad")
    with pytest.raises(MachineError) as caught:
        asked(tmp_path, "    max-num-seqs: [8, 16]", model=str(model))
    where = f"{tmp_path / 'space.yaml'}:2: serve.model: config.json cannot be read. Download the model again"
    assert str(caught.value).startswith(where)
    assert len(str(caught.value).splitlines()) == 1


def test_a_command_that_ends_at_once_is_told(tmp_path):
    site = tmp_path / "site"
    shutil.copytree(FAKE, site)
    (site / "vllm" / "entrypoints" / "openai" / "api_server.py").unlink()
    (note,) = asked(tmp_path, "    max-num-seqs: [8, 16]", package=site).notes
    assert note.startswith("serve.command: ")
    assert "vLLM has no module vllm.entrypoints.openai.api_server" in note
    assert "Write under serve: command: [python" in note


def test_true_is_not_1(tmp_path):
    told = space(tmp_path, "    max-num-seqs: [1, true]")
    with pytest.raises(ConfigError, match=r"search\.params\.max-num-seqs\.1: takes a whole number, not true"):
        asyncio.run(preflight(told))


def test_a_platform_has_rules_of_its_own(tmp_path):
    found = asked(tmp_path, "    block-size: [16, 32, 33, 64]")
    assert (found.platform, found.rules) == ("cpu", ("block-size % 32 == 0",))
    assert [bool(check.error) for check in found.alone["block-size"]] == [True, False, True, False]
    assert found.refused({"block-size": 33}) == "vLLM refuses block-size 33: it breaks the rule 'block-size % 32 == 0'"
    assert asked(tmp_path, "    block-size: [16, 32]", env=", FAKE_VLLM_PLATFORM: cuda").notes == ()


def test_a_platforms_rule_yields_to_what_vllm_does_itself():
    assert platform_rules("cpu", {"block-size": 128}, {}) == ("block-size % 32 == 0",)
    assert platform_rules("cpu", {"block-size": 16}, {}) == ()
    assert platform_rules("cpu", {"block-size": 16}, {"block-size": 16}) == ("block-size % 32 == 0",)
    assert platform_rules("cpu", {}, {}) == ("block-size % 32 == 0",)
    assert platform_rules("cuda", {"block-size": 128}, {}) == platform_rules(None, {}, {}) == ()


def test_flags_without_a_possible_value_end_it(tmp_path):
    with pytest.raises(ConfigError) as caught:
        asked(tmp_path, "    tensor-parallel-size: [3, 5]\n    block-size: [0, 33]\n    max-num-seqs: [1, 2]")
    lines = str(caught.value).splitlines()
    assert [line.partition("vLLM takes none of the values")[1] for line in lines] == [
        "vLLM takes none of the values"
    ] * 2
    assert ":10: search.params.tensor-parallel-size: " in lines[0]
    assert ":11: search.params.block-size: " in lines[1]


def test_what_is_sure_to_be_used_must_be_accepted(tmp_path):
    search = "baseline: {max-num-batched-tokens: 8}\n  enqueue: [{max-num-seqs: 16}, {tensor-parallel-size: 7}]"
    with pytest.raises(ConfigError) as caught:
        asked(tmp_path, "    max-num-seqs: [1, 2]", search=search)
    text = str(caught.value)
    assert ":8: search.baseline.max-num-batched-tokens: vLLM refuses this" in text
    assert ":9: search.enqueue.1: vLLM refuses this" in text


def test_a_configuration_that_drifts_says_nothing(tmp_path):
    found = asked(tmp_path, "    max-num-seqs: [64, 128]", env=", FAKE_VLLM_DRIFTS: x")
    assert found.same_config("max-num-seqs") == ()
    assert [check.error for check in found.alone["max-num-seqs"]] == [None, None]


def test_a_program_that_is_no_vllm_is_not_asked(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("""\
serve: {model: m, command: [/bin/true]}
load: {concurrency: 2, prompt: {tokens: 10}, output: {tokens: 5}, requests: 10}
search: {params: {max-num-seqs: [1, 2]}}
""")
    found = asyncio.run(preflight(load_config(path)))
    assert (found.alone, found.catalogue, found.refused({"max-num-seqs": 1})) == ({}, None, None)
    assert "could not be checked" in found.notes[0]


def test_offline_goes_by_what_was_read_before(tmp_path):
    good, bad = "    max-num-seqs: [1, 2]", "    max-num-sequences: [1, 2]"
    before = check_document(space(tmp_path, bad), ask_vllm=False)
    assert before["catalogue"] is None
    assert "were not checked" in before["notes"][0]
    asked(tmp_path, good)
    count = imports(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'max-num-seqs'"):
        asyncio.run(known_before(space(tmp_path, bad)))
    after = check_document(space(tmp_path, good), ask_vllm=False)
    assert after["catalogue"] == {"vllm_version": "0.99.0", "flags": 17, "kept": True}
    assert "are among the 17 that vLLM 0.99.0 has" in check_text(after)
    assert imports(tmp_path) == count


def test_offline_needs_no_program(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("""\
serve: {model: m, command: [no-such-vllm, serve]}
load: {concurrency: 2, prompt: {tokens: 10}, output: {tokens: 5}, requests: 10}
search: {params: {max-num-seqs: [1, 2]}}
""")
    config = load_config(path)
    assert "not a program" in asyncio.run(known_before(config)).notes[0]
    with pytest.raises(MachineError):
        asyncio.run(preflight(config))


def test_check_tells_what_it_has_found(tmp_path):
    params = "    tensor-parallel-size: [1, 3]\n    max-num-seqs: [16, 64, 128]"
    document = check_document(space(tmp_path, params), ask_vllm=True)
    assert document["refused"]["tensor-parallel-size"][0]["value"] == 3
    assert document["same_config"] == {"tensor-parallel-size": [], "max-num-seqs": [[64, 128]]}
    text = check_text(document)
    assert "Note: search.params.tensor-parallel-size: vLLM refuses 3: Total number" in text
    assert "Note: search.params.max-num-seqs: 64, 128 give the engine the same configuration." in text
    assert "vLLM 0.99.0, platform cpu" in text


def test_check_tells_what_there_is_no_memory_for(tmp_path):
    make(tmp_path / "model")
    params = "    gpu-memory-utilization: [0.001, 0.1, 0.999]\n    max-num-seqs: [16, 64]"
    told = space(tmp_path, params, search="baseline: {gpu-memory-utilization: 0.1}", model=str(tmp_path / "model"))
    document = check_document(told, ask_vllm=True)
    assert "leaves" in document["memory"]
    assert list(document["too_large"]) == ["gpu-memory-utilization"]
    small, large = document["too_large"]["gpu-memory-utilization"]
    assert (small["values"], large["values"]) == ([0.001], [0.999])
    assert "Note: search.params.gpu-memory-utilization: 0.999: gpu-memory-utilization" in check_text(document)


@given(st.integers(1, 10_000), st.integers(2, 200))
def test_chosen_values_are_spread_from_end_to_end(size, most):
    chosen = _spread(size, most)
    assert len(chosen) == len(set(chosen)) == min(size, most)
    assert list(chosen) == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, size - 1)
    steps = {after - before for before, after in pairwise(chosen)}
    assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("block-size", "1 validation error for CacheConfig\nblock_size\n  Input should be greater than 0 [type=x]"),
        ("tensor-parallel-size", "ValueError: heads must be divisible by tensor parallel size (3)."),
        ("quantization", "  Value error, Unknown quantization method: no. Must be one of ['awq'] [type=x]"),
    ],
)
def test_a_message_about_one_flag_alone_forbids_its_value(flag, message):
    assert _blamed(flag, message, KNOWN)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("max-num-seqs", "ValueError: max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (9)."),
        ("block-size", "ValueError: max_num_seqs must not be 7"),
        ("block-size", "ValueError: No available memory for the cache blocks. Lower block-size"),
        ("block-size", ""),
    ],
)
def test_any_other_message_forbids_nothing(flag, message):
    assert _blamed(flag, message, KNOWN) is None


def test_wrong_flags_are_told_beside_what_else_is_wrong_with_the_file(tmp_path):
    space(tmp_path, "    max-num-seqs: [1, 2]")
    path = tmp_path / "space.yaml"
    good = path.read_text()
    broken = (
        good.replace("requests: 10}", "request: 10}")
        .replace("args: {}", "args: {tp: 2, no-enable-prefix-caching: true, swap-space: 1, port: 80, seed: }")
        .replace("search:\n  ", "search:\n  baseline: {max-num-se: 1, a b: 1}\n  enqueue: [{block-size: 1.5}, 3]")
        .replace("max-num-seqs: [1, 2]", "max_num_seq: [1, 2]\n    block-size: []\n    scheduling-policy: [fcfs, lifo]")
    )
    path.write_text(broken)
    with pytest.raises(ConfigError) as before:
        load_space(path)
    path.write_text(good)
    asyncio.run(preflight(load_space(path)))
    path.write_text(broken)
    with pytest.raises(ConfigError) as after:
        load_space(path)
    text = str(after.value)
    assert "load.request" in str(before.value)
    assert text.startswith(str(before.value))
    told = [line.removeprefix(f"{path}:") for line in text.removeprefix(str(before.value)).strip().splitlines()]
    assert [line.partition(" ")[0] + line.split(": ")[1] for line in told] == [
        "5:serve.args.swap-space",
        "8:search.baseline.max-num-se",
        "9:search.enqueue.0.block-size",
        "11:search.params.max-num-seq",
        "13:search.params.scheduling-policy.1",
    ]


def test_a_file_that_cannot_be_read_has_only_its_own_error(tmp_path):
    path = tmp_path / "space.yaml"
    for text in ("serve: [", "serve: {command: 3}\n", "serve: {command: [no-such-vllm]}\n", "search: 3\nserve: 4\n"):
        path.write_text(text)
        with pytest.raises(ConfigError) as told:
            load_space(path)
        with pytest.raises(ConfigError) as plain:
            load_config(path)
        assert str(told.value) == str(plain.value)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"args": "block-size: 48"}, r"space\.yaml:5: serve\.args\.block-size: breaks the rule 'block-size % 32 == 0'"),
        ({"search": "baseline: {block-size: 16}"}, r"space\.yaml:8: search\.baseline\.block-size: breaks the rule"),
        ({"search": "enqueue: [{block-size: 16}]"}, r"space\.yaml:8: search\.enqueue\.0\.block-size: breaks the rule"),
    ],
)
def test_what_this_platform_cannot_have_is_told_before_a_launch(
    tmp_path: Path, given: dict[str, str], place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        asked(tmp_path, "    max-num-seqs: [8, 16]", **given)
