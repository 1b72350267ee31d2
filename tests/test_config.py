"""A search space is checked as a whole, and each problem names its file, line, key and fix."""

from __future__ import annotations

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
