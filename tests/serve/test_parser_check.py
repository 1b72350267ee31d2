import asyncio
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.errors import MachineError
from sweep.serve.failures import classify
from sweep.serve.kind import ServeSection
from sweep.serve.parser_check import check_configs, compare_configs
from sweep.serve.vllm_flags import config_text

FAKE = Path(__file__).parents[1] / "fakes" / "vllm.py"


def check(tmp_path, command, models=None, base=None, compared=(), **configs):
    paths = {}
    for name, flags in configs.items():
        paths[name] = tmp_path / f"{name}.yaml"
        paths[name].write_text(config_text(str((models or {}).get(name, tmp_path)), None, flags))
    serve = ServeSection.model_validate({"model": "org/model", "command": command})
    return asyncio.run(compare_configs(serve, paths, base=base, compared=compared))


def test_a_program_that_is_not_vllm_is_left_alone(tmp_path):
    checked = check(tmp_path, [sys.executable, str(FAKE)], one={}, two={}).compared
    assert all("neither" in result.unchecked for result in checked.values())
    assert all(result.error is None for result in checked.values())


def script(folder, text):
    path = folder / "start"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_script_in_python_is_asked_only_if_vllm_is_there(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    python = f"{bare}/bin/python"
    wrapper = script(tmp_path, f"#!{python}\nimport os\nos.execv('/usr/bin/docker', ['docker', 'run'])\n")
    result = check(tmp_path, [wrapper], one={}).compared["one"]
    assert result.error is None
    assert "neither `vllm` nor" in result.unchecked
    installed = script(tmp_path, f"#!{python}\nfrom vllm.entrypoints.cli.main import main\nmain()\n")
    assert "No module named 'vllm'" in check(tmp_path, [installed], one={}).compared["one"].error
    module = check(tmp_path, [python, "-m", "vllm.entrypoints.openai.api_server"], one={}).compared["one"]
    assert "No module named 'vllm'" in module.error


def test_an_environment_without_vllm_says_so(tmp_path):
    bare = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    program = script(tmp_path, f"#!{bare}\nfrom vllm.entrypoints.cli.main import main\n")
    package = tmp_path / "empty" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\")\n")
    serve = ServeSection.model_validate(
        {"model": "org/model", "command": [program, "serve"], "env": {"PYTHONPATH": str(package.parent)}}
    )
    checked = asyncio.run(check_configs(serve, {"one": tmp_path / "one.yaml"}))
    assert classify(checked["one"].error, exit_code=1, phase="start").kind == "version_mismatch"


def test_a_missing_program_is_the_machines_fault(tmp_path):
    with pytest.raises(MachineError):
        check(tmp_path, ["no-such-vllm", "serve"], one={})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs an installed vLLM")
def test_the_installed_vllm_reads_what_was_meant(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1024,'
        ' "max_position_embeddings": 2048, "dtype": "bfloat16"}'
    )
    experts = tmp_path / "experts"
    experts.mkdir()
    (experts / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 256,'
        ' "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,'
        ' "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 2048,'
        ' "dtype": "bfloat16"}'
    )
    flags = {
        "enable-prefix-caching": False,
        "max-num-seqs": 8,
        "served-model-name": ["a", "b"],
        "hf-overrides": {"use_cache": False},
        "compilation-config.cudagraph_copy_inputs": False,
    }
    answer = check(
        tmp_path,
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        models={"experts": experts},
        base="defaults",
        compared=("spelt out", "nested", "too many", "utilization"),
        defaults={},
        experts={},
        meant=flags,
        unknown={"max-num-sequences": 8},
        refused={"max-num-seqs": 4096, "max-num-batched-tokens": 64},
        **{
            "spelt out": {"enable-prefix-caching": True, "enable-chunked-prefill": True},
            "nested": {"compilation-config.cudagraph_copy_inputs": True},
            "too many": {"max-num-seqs": 100_000},
            "utilization": {"gpu-memory-utilization": 0.123},
        },
    )
    checked = answer.compared
    meant, defaults = checked["meant"], checked["defaults"]
    assert meant.error is None
    assert {name: meant.parsed[name] for name in flags if "." not in name} == {
        name: value for name, value in flags.items() if "." not in name
    }
    assert "'cudagraph_copy_inputs': False" in meant.parsed["compilation-config"]
    assert (meant.resolved["enable-prefix-caching"], defaults.resolved["enable-prefix-caching"]) == (False, True)
    assert (meant.resolved["max-num-seqs"], meant.resolved["max-model-len"]) == (8, 2048)
    assert defaults.resolved["gpu-memory-utilization"] > 0.5
    assert (defaults.moe, checked["experts"].moe) == (False, True)
    assert "unrecognized arguments: --max-num-sequences" in checked["unknown"].error
    assert "usage" not in checked["unknown"].error
    assert classify(checked["refused"].error, exit_code=1, phase="start").kind == "invalid_argument"
    assert {result.vllm_version for result in checked.values()} == {meant.vllm_version}
    assert {result.platform for result in checked.values()} <= {"cpu", "cuda", "rocm"}
    # What is vLLM's own default makes no difference; nothing of another build of the same flags does.
    assert checked["spelt out"].changes == {}
    assert checked["nested"].changes == {"compilation_config.cudagraph_copy_inputs": "true"}
    assert checked["utilization"].changes == {"cache_config.gpu_memory_utilization": "0.123"}
    assert checked["too many"].changes is None
    assert "max_num_batched_tokens" in checked["too many"].error
    engine = {"max-num-seqs", "max-num-batched-tokens", "block-size", "enable-prefix-caching", "compilation-config"}
    assert answer.shown >= engine | {"kv-cache-dtype", "attention-backend", "scheduling-policy", "moe-backend"}
    assert not answer.shown & {"uvicorn-log-level", "disable-log-stats", "api-server-count"}
