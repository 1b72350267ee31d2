import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from sweep.errors import MachineError
from sweep.model import Launch
from sweep.serve.kind import MARKER, ServeSection, argv, child_env, resolve_program, served_model


def section(**keys):
    return ServeSection.model_validate({"model": "org/model", **keys})


def launch(tmp_path, **keys) -> Launch:
    return section(**keys).launch({}, swept=(), trial_dir=tmp_path)


def test_defaults():
    serve = section()
    assert serve.command == ("vllm", "serve")
    assert (serve.args, serve.env, serve.allow_remote_code) == ({}, {}, False)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "--config"}, "begin with a dash"),
        ({"model": "a b"}, "without spaces"),
        ({"model": "a\x1b[31m"}, "control characters"),
        ({"model": ""}, "name or a path"),
        ({"revision": "-x"}, "begin with a dash"),
        ({"command": []}, "at least 1"),
        ({"command": ["vllm", ""]}, "empty word"),
        ({"env": {"HF_TOKEN": "x"}}, "export it in the shell"),
        ({"env": {"VLLM_API_KEY": "x"}}, "export it in the shell"),
        ({"env": {"AWS_SECRET_ACCESS_KEY_ID": "x"}}, "export it in the shell"),
        ({"env": {"TMPDIR": "/x"}}, "set by every launch"),
        ({"env": {"A": True}}, "in quotes"),
        ({"env": {"A B": "x"}}, "not the name"),
        ({"args": {"port": 80}}, "every launch sets it"),
        ({"args": {"trust-remote-code": True}}, "allow_remote_code"),
        ({"start_timeout_s": 0}, "greater than 0"),
        ({"modle": "x"}, "Extra inputs"),
    ],
)
def test_bad_sections_are_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        section(**keys)


def test_sound_values_are_taken():
    serve = section(
        allow_remote_code=True,
        args={"trust_remote_code": True, "max_model_len": 8192},
        env={"OMP_NUM_THREADS": 2, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert serve.args == {"trust-remote-code": True, "max-model-len": 8192}
    assert serve.env == {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}


def test_a_folder_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert section(model="weights").model == str(tmp_path / "weights")
    assert section(model="org/weights").model == "org/weights"
    assert section(model="~/weights").model == str(Path.home() / "weights")


def test_a_launch_holds_the_fixed_flags_and_those_of_the_trial(tmp_path):
    serve = section(args={"max-num-seqs": 8, "dtype": "half"})
    made = serve.launch({"max-num-seqs": 64}, swept=("max-num-seqs",), trial_dir=tmp_path)
    assert made.flags == {"max-num-seqs": 64, "dtype": "half"}
    assert made.trial_dir == str(tmp_path)
    assert made.model == "org/model"


def test_programs_beside_this_python_come_first(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(resolve_program("python")).parent == Path(sys.executable).parent


def test_a_missing_program_is_the_machines_fault():
    for name in ("no-such-program", "./no/such/program"):
        with pytest.raises(MachineError, match=name):
            resolve_program(name)


def test_argv_names_the_file_and_how_it_is_run_here(tmp_path):
    words = argv(launch(tmp_path, command=["python", "-m", "vllm.entrypoints.openai.api_server"]), port=8123)
    assert words[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--config", str(tmp_path / "serve.yaml")]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "8123"
    assert "--shutdown-timeout" in words


def test_environment_of_a_launch(tmp_path):
    inherited = {
        "PATH": "/bin",
        "HF_TOKEN": "secret",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_API_KEY": "old",
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
    }
    made = launch(tmp_path, env={"NCCL_DEBUG": "WARN"})
    env = child_env(made, inherited, marker="m1", api_key="k1", tmp=Path("/tmp/x"))
    assert env["PATH"] == "/bin"
    assert env["HF_TOKEN"] == "secret"
    assert env["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["VLLM_API_KEY"] == "k1"
    assert env[MARKER] == "m1"
    assert env["TMPDIR"] == env["VLLM_RPC_BASE_PATH"] == "/tmp/x"
    assert not {"VLLM_PORT", "VLLM_SERVICE_HOST"} & env.keys()


def test_the_name_that_requests_use(tmp_path):
    assert served_model(launch(tmp_path)) == "org/model"
    assert served_model(launch(tmp_path, args={"served-model-name": ["a", "b"]})) == "a"
    assert served_model(launch(tmp_path, args={"served-model-name": "c"})) == "c"
