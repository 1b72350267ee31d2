"""A search space is checked as a whole, and each problem names its file, line, key and fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweep.config import SweepConfig, config_from_data, load_config
from sweep.errors import ConfigError

GOOD = """\
serve:
  model: some/model
  args: {max-model-len: 1024}
search:
  objective: {maximize: output_tps}
  params:
    max-num-seqs: {low: 4, high: 64, step: pow2}
    enable-prefix-caching: [true, false]
load:
  concurrency: 8
  prompt: {tokens: 100}
  output: {tokens: 20}
  requests: 50
run: {name: good, trials: 5}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> SweepConfig:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_a_good_space_loads_with_its_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.run.trials == 5
    assert config.baseline == {}
    assert config.space.size == 10
    assert config.flags({"max-num-seqs": 8}) == {"max-model-len": 1024, "max-num-seqs": 8}
    assert config.serve.command == ("vllm", "serve")


def test_the_name_is_the_file_s_when_none_is_given(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD.replace("run: {name: good, trials: 5}\n", ""))
    assert config.run.name == "space"


def test_overrides_from_the_command_line(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "run.trials=7", "search.params.max-num-seqs=[8, 16]", "run.hours=1.5")
    assert (config.run.trials, config.run.hours) == (7, 1.5)
    assert list(config.search.params["max-num-seqs"].values()) == [8, 16]
    for bad in ("run.trials", "=3", "run.trials=: :"):
        with pytest.raises(ConfigError, match="--set"):
            load(tmp_path, GOOD, bad)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("trials: 5", "trails: 5", [":14:", "run.trails", "did you mean 'trials'"]),
        ("trials: 5", "trials: 0", [":14:", "run.trials", "greater than or equal to 1"]),
        ("name: good", "name: ../bad", [":14:", "run.name", "folder"]),
        ("serve:", "server:", [":1:", "server", "did you mean 'serve'"]),
        ("  model: some/model\n", "", ["serve.model", "missing"]),
        ("concurrency: 8", "concurrency: 8\n  rate: 2", ["load", "rate"]),
        ("concurrency: 8", "concurency: 8", [":10:", "concurency", "did you mean 'concurrency'"]),
        ("max-num-seqs: {low: 4, high: 64", "max-num-seqs: {low: 64, high: 4", [":7:", "max-num-seqs", "64"]),
        ("max-num-seqs: {", "max-model-len: {", ["max-model-len", "serve.args"]),
        ("max-num-seqs: {low: 4, high: 64, step: pow2}", "dtype: [half, auto]", [":7:", "allow_quality_change"]),
        ("max-num-seqs: {low: 4, high: 64, step: pow2}", "port: [1, 2]", [":7:", "port", "cannot be set here"]),
        ("max-num-seqs: {low: 4, high: 64, step: pow2}", "trust-remote-code: [true]", ["allow_remote_code"]),
        ("args: {max-model-len: 1024}", "args: {host: 0.0.0.0}", [":3:", "host"]),
        ("args: {max-model-len: 1024}", "args: {max-model-len: 64}", ["120", "64"]),
        ("  params:", "  rules: [max-num-seq >= 2]\n  params:", [":6:", "max-num-seq", "did you mean"]),
        ("  params:", "  rules: [import os]\n  params:", [":6:", "rules"]),
        (
            "  params:",
            "  baseline: {max-num-seqs: 9, max-num-batched-tokens: 8}\n  params:",
            [":6:", "breaks the rule"],
        ),
        ("  params:", "  baseline: vllm serve other/model\n  params:", [":6:", "other/model", "some/model"]),
        ("  params:", "  enqueue: [{port: 3}]\n  params:", [":6:", "port"]),
        ("{maximize: output_tps}", "{maximize: output_tsp}", [":5:", "output_tsp", "output_tps"]),
        ("{maximize: output_tps}", "{maximize: output_tps, slo: {ttft_p99: 200}}", [":5:", "200ms"]),
        ("prompt: {tokens: 100}", "prompt: {token: 100}", [":11:", "load.prompt.token", "did you mean 'tokens'"]),
        ("tokens: 100}", "tokens: {mena: 100, std: 1}}", [":11:", "load.prompt.tokens.mena", "did you mean 'mean'"]),
        ("tokens: 100}", "tokens: {mean: 100}}", [":11:", "load.prompt.tokens.std", "missing"]),
        ("tokens: 100}", "tokens: many}", [":11:", "load.prompt.tokens: ", "valid integer"]),
        ("concurrency: 8", "rate: {form: 1, to: 2}", [":10:", "load.rate.form", "did you mean 'from'"]),
        ("concurrency: 8", "rate: max", [":10:", "load.rate", "search.objective", "ttft_p99: 500ms"]),
        ("concurrency: 8", "rate: most", [":10:", "load.rate: ", "'max'"]),
        ("concurrency: 8", "concurrency: 8\n  processes: all", [":11:", "load.processes: ", "'auto'"]),
        ("concurrency: 8", "concurrency: 8\n  turns: 9", [":9:", "1080 tokens with its history", "1024"]),
        ("concurrency: 8", "concurrency: 8\n  adapters: [sql]", [":11:", "load.adapters", "enable-lora: true"]),
        ("concurrency: 8", "rate: 1\n  mix: [{name: a, share: 1, trun: 2}]", [":11:", "load.mix.0.trun", "'turns'"]),
        ("concurrency: 8", "rate: 1\n  mix: [{name: A, share: 1}]", [":11:", "load.mix.0.name", "small letters"]),
        ("concurrency: 8", "rate: 1\n  request: {stream: false}", [":11:", "load.request", "stream"]),
        (
            "{maximize: output_tps}",
            "{maximize: rate_rps, slo: {ttft_p99: 1s}}",
            [":5:", "search.objective", "load.rate: max"],
        ),
        ("{maximize: output_tps}", "{maximize: goodput_rps}", ["search.objective", "slo"]),
        ("max-model-len: 1024", "speculative-config: {method: ngram}", ["load.prompt", "load.prompt.file"]),
        ("  params:", "  enqueue: [{spec-method: ngram}]\n  params:", ["spec-method", "load.prompt.file"]),
        ("prompt: {tokens: 100}", "prompt: {file: none.jsonl}", [":11:", "load.prompt.file", "no such file"]),
    ],
)
def test_each_problem_names_place_key_and_fix(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD.replace(old, new, 1))
    message = str(error.value)
    assert message.startswith(str(tmp_path / "space.yaml"))
    for part in expected:
        assert part in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD.replace("trials: 5", "trails: 5").replace("tokens: 100", "tokens: -1"))
    assert "trails" in str(error.value)
    assert "prompt.tokens" in str(error.value)


def test_a_pasted_command_line_is_a_baseline(tmp_path: Path) -> None:
    pasted = (
        "  baseline: |\n    vllm serve some/model --max-num-seqs 16 \\\n      --no-enable-prefix-caching --port 80\n"
    )
    config = load(tmp_path, GOOD.replace("  params:", pasted + "  params:"))
    assert config.baseline == {"max-num-seqs": 16, "enable-prefix-caching": False}


def test_secrets_do_not_appear_in_messages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD.replace("serve:\n", "serve:\n  env: {HF_TOKEN: hf_canary123}\n"))
    assert "HF_TOKEN" in str(error.value)
    assert "hf_canary123" not in str(error.value)


def test_a_stored_configuration_loads_again(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD.replace("output_tps}", "output_tps, slo: {ttft_p99: 200ms}}"))
    again = config_from_data(config.model_dump(mode="json"), Path("config.yaml"))
    assert again == config


LORA = "args: {max-model-len: 1024, enable-lora: true, lora-modules: ['law=a/b', {name: sql, path: a/c}]}"


def test_adapters_are_those_that_the_server_has(tmp_path: Path) -> None:
    served = GOOD.replace("args: {max-model-len: 1024}", LORA)
    assert load(tmp_path, served, "load.adapters=[sql, law]").load.kinds[0].adapters == ("sql", "law")
    with pytest.raises(ConfigError, match="tax is not among"):
        load(tmp_path, served, "load.adapters=[sql, tax]")


def test_the_limits_of_classes_are_limits_of_the_objective(tmp_path: Path) -> None:
    mixed = GOOD.replace("concurrency: 8", "rate: max\n  mix: [{name: chat, share: 1, slo: {ttft_p99: 300ms}}]")
    config = load(tmp_path, mixed)
    assert config.objective.slo == {"chat.ttft_p99": 0.3}
    assert config.search.objective.slo == {}
    assert config_from_data(config.model_dump(mode="json"), Path("config.yaml")) == config


ROWS = '{"prompt": "a b c", "output_tokens": 4}\n{"prompt": "d", "output_tokens": 5}\n'


def test_files_are_found_from_the_space_s_folder_and_read_at_once(tmp_path: Path) -> None:
    recorded = GOOD.replace("prompt: {tokens: 100}", "prompt: {file: data/p.jsonl}")
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "p.jsonl"
    file.write_text(ROWS)
    config = load(tmp_path, recorded)
    assert config.load.prompt is not None
    assert config.load.prompt.file == str(file)
    assert config.load.longest_tokens is None
    set_here = load(tmp_path, GOOD, "load.prompt={file: data/p.jsonl}")
    assert set_here.load == config.load
    classes = GOOD.replace("prompt: {tokens: 100}", "mix: [{name: a, share: 1, prompt: {file: data/p.jsonl}}]")
    assert load(tmp_path, classes).load.kinds[0].prompt == config.load.prompt
    file.write_text(ROWS + "{\n")
    with pytest.raises(ConfigError, match=r"space\.yaml:11: load\.prompt\.file: .*p\.jsonl:3: not JSON"):
        load(tmp_path, recorded)
    (tmp_path / "q.jsonl").write_text(ROWS)
    two = "mix: [{name: b, share: 1, prompt: {file: q.jsonl}},\n    {name: a, share: 1, prompt: {file: data/p.jsonl}}]"
    with pytest.raises(ConfigError, match=r"space\.yaml:12: load\.mix\.1\.prompt\.file: "):
        load(tmp_path, GOOD.replace("prompt: {tokens: 100}", two))
    # What a study's folder keeps is not read again for a report.
    file.unlink()
    assert config_from_data(config.model_dump(mode="json"), Path("config.yaml")) == config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nosuchuser/x.jsonl", "~nosuchuser/x.jsonl: no such user"),
        ('"a\\0b"', "no name that a file can have"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_names_that_no_file_has_are_placed(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"space\.yaml:11: load\.prompt\.file: .*{words}"):
        load(tmp_path, GOOD.replace("prompt: {tokens: 100}", f"prompt: {{file: {name}}}"))


def test_the_file_with_rows_that_are_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(ROWS)
    (tmp_path / "p.jsonl").write_text(ROWS + '\n{"prompt": "d", "output_tokens": 1024}\n')
    two = "mix: [{name: b, share: 1, prompt: {file: p}, output: {}},\n"
    two += "    {name: a, share: 1, prompt: {file: p.jsonl}, output: {}}]"
    with pytest.raises(ConfigError, match=r":12: load\.mix\.1\.prompt\.file: 1 rows need .*p\.jsonl:4; raise"):
        load(tmp_path, GOOD.replace("prompt: {tokens: 100}", two))


def test_a_trace_is_checked_against_what_the_server_accepts(tmp_path: Path) -> None:
    traced = re.sub(r"  concurrency: 8\n.*\n.*\n  requests: 50", "  trace: t.jsonl", GOOD)
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 24}\n')
    assert load(tmp_path, traced).load.trace == str(file)
    file.write_text('\n\n{"timestamp": 0, "input_length": 1000, "output_length": 25}\n')
    with pytest.raises(
        ConfigError, match=r":10: load\.trace: 1 rows need more than serve\.args\.max-model-len 1024, .*jsonl:3"
    ):
        load(tmp_path, traced)
    with pytest.raises(ConfigError, match="random tokens say nothing of speculative decoding"):
        load(tmp_path, traced.replace("max-model-len: 1024", "spec-method: ngram"))


def test_speculative_decoding_is_measured_on_recorded_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(ROWS)
    recorded = GOOD.replace("prompt: {tokens: 100}", "prompt: {file: p.jsonl}")
    config = load(tmp_path, recorded.replace("max-model-len: 1024", "speculative-config: {method: ngram}"))
    assert not config.load.synthetic


def test_a_prefix_cache_without_shared_prefixes_is_noted(tmp_path: Path) -> None:
    def noted(*overrides: str) -> bool:
        return any("no two prompts" in note for note in load(tmp_path, GOOD, *overrides).notes())

    assert noted()
    assert not noted("load.prompt.shared_prefix=40")
    assert not noted("load.turns=2")
