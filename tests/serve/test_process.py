import asyncio
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
import yaml

from sweep.errors import MachineError
from sweep.model import Launch
from sweep.serve.kind import MARKER, ServeSection
from sweep.serve.process import Server, _tmp_root, kill_leftovers, marker_of

FAKE = Path(__file__).parents[1] / "fakes" / "vllm.py"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Make launches of the fake, and prove after the test that no process and no folder of theirs is left."""
    made: list[Launch] = []

    def make(fault: str = "", *, command=(sys.executable, str(FAKE)), flags=None, swept=(), **limits) -> Launch:
        monkeypatch.setenv("FAKE_VLLM_FAULT", fault)
        serve = ServeSection.model_validate(
            {"model": "org/model", "command": list(command), "start_timeout_s": 20, "stop_timeout_s": 2, **limits}
        )
        made.append(serve.launch(flags or {}, swept=swept, trial_dir=tmp_path / "trial"))
        return made[-1]

    yield make
    for one in made:
        assert processes_of(one) == []
        assert folders_of(one) == []


def processes_of(launch: Launch) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker_of(launch.trial_dir):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def folders_of(launch: Launch) -> list[Path]:
    return list(Path(_tmp_root()).glob(f"sweep-{marker_of(launch.trial_dir)}-*"))


async def probe(server: Server) -> str | None:
    body = {"model": server.served_model, "prompt": [5, 6, 7], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{server.base_url}/v1/completions", json=body) as response,
    ):
        return None if response.status == 200 else f"HTTP {response.status}"


async def start(launch: Launch):
    async with Server(launch) as server:
        return await server.wait_ready(probe)


def test_a_server_comes_up_answers_and_goes(launch):
    async def live(made):
        told: list[str] = []
        async with Server(made, on_progress=told.append) as server:
            assert await server.wait_ready(probe) is None
            assert server.exit_code is None
            facts = await server.facts()
            processes = processes_of(made)
            assert await server.stop() == ()
            assert await server.exited() == server.exit_code == 0
        return told, facts, processes

    made = launch(flags={"max-num-seqs": 8, "enable-prefix-caching": False})
    told, facts, processes = asyncio.run(live(made))
    assert told[-1] == "first completion"
    assert facts.vllm_version == "0.32.0"
    assert facts.kv_cache_tokens > 0
    assert len(processes) == 2
    trial = Path(made.trial_dir)
    assert yaml.safe_load((trial / "serve.yaml").read_text()) == {
        "model": "org/model",
        "max-num-seqs": 8,
        "no-enable-prefix-caching": True,
    }
    assert stat.S_IMODE((trial / "server.log").stat().st_mode) == 0o600


def test_only_this_machine_can_reach_the_server(launch):
    async def listening(made):
        async with Server(made) as server:
            assert await server.wait_ready(probe) is None
            return [
                connection.laddr.ip
                for connection in psutil.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
            ]

    assert asyncio.run(listening(launch())) == ["127.0.0.1"]


def test_the_key_of_each_launch_is_wanted(launch):
    async def without_key(made):
        async with Server(made) as server:
            assert await server.wait_ready(probe) is None
            async with aiohttp.ClientSession() as session, session.get(f"{server.base_url}/v1/models") as response:
                return response.status

    assert asyncio.run(without_key(launch())) == 401


@pytest.mark.parametrize(
    ("fault", "flags", "kind", "treatment"),
    [
        ("die_at_start", {}, "other", "fail_trial"),
        ("gated", {}, "auth_gated_model", "abort_sweep"),
        ("model_missing", {}, "model_not_found", "abort_sweep"),
        ("wrong_model_name", {}, "client_404_model_name", "abort_sweep"),
        ("", {"gpu-memory-utilization": 1.0}, "oom_free_memory_lt_requested", "prune"),
        ("", {"gpu-memory-utilization": 0.1}, "oom_kv_cache_none", "prune"),
        ("", {"max-num-seqs": 512, "max-num-batched-tokens": 128}, "invalid_argument", "prune"),
        ("", {"no-such-flag": 1}, "invalid_argument", "abort_sweep"),
    ],
)
def test_a_start_that_fails_is_a_value(launch, fault, flags, kind, treatment):
    failure = asyncio.run(start(launch(fault, flags=flags, swept=tuple(flags))))
    assert (failure.kind, failure.treatment, failure.phase) == (kind, treatment, "start")


def test_a_fixed_flag_at_fault_stops_the_sweep(launch):
    flags = {"max-num-seqs": 512, "max-num-batched-tokens": 128}
    assert asyncio.run(start(launch(flags=flags))).treatment == "abort_sweep"


def test_silence_is_noticed(launch):
    failure = asyncio.run(start(launch("hang_start", stall_timeout_s=1)))
    assert failure.kind == "hang_timeout"
    assert "no new line" in failure.evidence


def test_a_server_that_talks_and_never_comes_up_meets_its_deadline(launch):
    failure = asyncio.run(start(launch("slow_start=60", start_timeout_s=1.5, stall_timeout_s=30)))
    assert failure.kind == "hang_timeout"
    assert "not ready" in failure.evidence


def test_a_first_completion_that_never_comes_meets_the_deadline(launch):
    async def hang(_: Server) -> str | None:
        await asyncio.sleep(60)

    async def live(made):
        async with Server(made) as server:
            return await server.wait_ready(hang)

    failure = asyncio.run(live(launch(start_timeout_s=2)))
    assert failure.kind == "hang_timeout"
    assert "first completion" in failure.evidence


def test_a_stranger_on_the_port_is_not_taken_for_the_server(launch):
    async def live(made):
        stranger = await asyncio.start_server(answer_anything, "127.0.0.1", 0)
        async with Server(made) as server, stranger:
            server.port = stranger.sockets[0].getsockname()[1]
            return await server.wait_ready(probe)

    async def answer_anything(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    failure = asyncio.run(live(launch("slow_start=30")))
    assert (failure.kind, failure.treatment) == ("port_in_use", "retry")
    assert str(os.getpid()) in failure.evidence


def test_a_probe_that_fails_is_said(launch):
    async def refuse(_: Server) -> str | None:
        return "HTTP 400 bad prompt"

    async def live(made):
        async with Server(made) as server:
            return await server.wait_ready(refuse)

    assert asyncio.run(live(launch())).evidence == "HTTP 400 bad prompt"


@pytest.mark.parametrize("fault", ["", "setsid_engine"])
def test_an_engine_that_outlives_its_api_server_is_ended(launch, fault):
    async def orphan(made):
        async with Server(made) as server:
            assert await server.wait_ready(probe) is None
            api = psutil.Process(next(p.pid for p in processes_of(made) if p.ppid() == os.getpid()))
            api.kill()
            assert await server.exited() == -signal.SIGKILL
            assert processes_of(made)

    asyncio.run(orphan(launch(fault, stop_timeout_s=0.5)))


def test_a_server_that_ignores_sigterm_is_killed(launch):
    async def live(made):
        async with Server(made) as server:
            assert await server.wait_ready(probe) is None
        return server.exit_code

    assert asyncio.run(live(launch("ignore_sigterm", stop_timeout_s=0.3))) == -signal.SIGKILL


def test_a_cancelled_trial_still_ends_its_server(launch):
    async def cancel(made):
        up = asyncio.Event()

        async def live():
            async with Server(made) as server:
                assert await server.wait_ready(probe) is None
                up.set()
                await asyncio.sleep(60)

        trial = asyncio.create_task(live())
        await up.wait()
        trial.cancel()
        await asyncio.sleep(0.1)
        trial.cancel()  # and once more, in the middle of the cleaning up
        with pytest.raises(asyncio.CancelledError):
            await trial
        return processes_of(made)

    assert asyncio.run(cancel(launch("ignore_sigterm", stop_timeout_s=0.5))) == []


def test_what_a_dead_worker_left_is_found_again(launch):
    made = launch()

    async def abandon():
        server = await Server(made).__aenter__()
        assert await server.wait_ready(probe) is None
        assert processes_of(made)
        assert folders_of(made)
        assert await kill_leftovers(made.trial_dir) == ()
        await server.exited()

    asyncio.run(abandon())


def test_a_flood_of_log_does_not_stop_a_server(launch):
    made = launch("flood_log")
    assert asyncio.run(start(made)) is None
    assert (Path(made.trial_dir) / "server.log").stat().st_size > 1 << 16


def test_exit_0_under_load_is_a_failure_all_the_same(launch):
    async def live(made):
        async with Server(made) as server:
            assert await server.wait_ready(probe) is None
            assert await server.exited() == 0
            return await server.failure("load")

    failure = asyncio.run(live(launch("exit0_after=1")))
    assert failure.kind == "engine_dead"
    assert failure.phase == "load"


def test_a_program_that_is_not_there_is_the_machines_fault(launch, tmp_path):
    with pytest.raises(MachineError, match="no-such-vllm"):
        asyncio.run(start(launch(command=["no-such-vllm"])))
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(MachineError, match="cannot start"):
        asyncio.run(start(launch(command=[str(broken)])))


def test_two_servers_at_once_have_ports_of_their_own(launch, tmp_path):
    async def live(first, second):
        async with Server(first) as one, Server(second) as two:
            assert await asyncio.gather(one.wait_ready(probe), two.wait_ready(probe)) == [None, None]
            assert one.port != two.port
            with socket.create_connection(("127.0.0.1", two.port)):
                await one.stop()
            assert await probe(two) is None

    first = launch()
    second = ServeSection(model="org/model", command=first.command).launch({}, swept=(), trial_dir=tmp_path / "other")
    asyncio.run(live(first, second))
    assert processes_of(second) == []
