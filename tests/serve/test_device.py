"""NVML is played by an object with its functions: GPUs with MIG and faults are on no machine when one needs them."""

import os
from types import SimpleNamespace

import pynvml
import pytest
from hypothesis import given, strategies as st

from sweep.model import DeviceMemory
from sweep.serve.device import device_memory, read_gpus
from sweep.serve.numa import node_memory

GIB = 1 << 30
UUIDS = ("GPU-aa11-0", "GPU-aa22-1", "GPU-bb33-2")


class Board:
    def __init__(self, uuid, *, free=70, total=80, instances=(), **told):
        self.uuid = uuid
        self.name = "NVIDIA H100"
        self.memory = SimpleNamespace(total=total * GIB, free=free * GIB, reserved=GIB // 2)
        self.instances = instances
        self.told = told


class Nvml:
    """The part of NVML that is used. What a board was not given is not supported by it."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = pynvml.NVML_VOLATILE_ECC

    def __init__(self, *boards, error=None, lost=False, old=False):
        self.nvmlMemory_v2 = pynvml.nvmlMemory_v2
        self.boards, self.error, self.lost, self.old, self.open = boards, error, lost, old, 0

    def nvmlInit(self):
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.boards[index]

    def nvmlDeviceGetUUID(self, board):
        return board.uuid

    def nvmlDeviceGetName(self, board):
        return board.name

    def nvmlDeviceGetMemoryInfo(self, board, version=None):
        if board.memory is None or (self.old and version):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return board.memory

    def nvmlDeviceGetMigMode(self, board):
        return [int(bool(board.instances)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, board):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board, index):
        if index >= len(board.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return board.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, instance):
        return instance.told["part"]

    def nvmlDeviceGetComputeInstanceId(self, instance):
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, board):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.tell(board, "processes")]

    def nvmlDeviceGetPersistenceMode(self, board):
        return self.tell(board, "persistence")

    def nvmlDeviceGetComputeMode(self, board):
        return self.tell(board, "mode")

    def nvmlDeviceGetTotalEccErrors(self, board, kind, counter):
        return self.tell(board, "ecc")

    def nvmlDeviceGetRemappedRows(self, board):
        return (0, 1, self.tell(board, "pending"), 0)

    def nvmlDeviceGetEnforcedPowerLimit(self, board):
        return self.tell(board, "limit")

    def nvmlDeviceGetPowerManagementDefaultLimit(self, board):
        return self.tell(board, "usual")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, board):
        return self.tell(board, "reasons")

    def tell(self, board, what):
        if what not in board.told:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return board.told[what]


def three():
    return Nvml(*(Board(uuid, free=70 - 10 * number) for number, uuid in enumerate(UUIDS)))


def visible(value, nvml=None):
    gpus = read_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, nvml or three())
    return [gpu.index for gpu in gpus.visible], gpus.unknown


@pytest.mark.parametrize(
    ("value", "seen", "unknown"),
    [
        (None, [0, 1, 2], None),
        ("", [], None),
        ("2,0", [2, 0], None),
        (" 1 , 2 ", [1, 2], None),
        ("0,0", [0], None),
        ("0,2,-1,1", [0, 2], "-1"),
        ("-1", [], "-1"),
        ("9", [], "9"),
        ("1,9,0", [1], "9"),
        ("GPU-aa22-1", [1], None),
        ("GPU-bb", [2], None),
        ("GPU-aa", [], "GPU-aa"),
        ("GPU-bb,0", [2, 0], None),
        ("NoDevFiles", [], "NoDevFiles"),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(value, seen, unknown):
    assert visible(value) == (seen, unknown)


@given(st.lists(st.integers(0, 2), min_size=1))
def test_indices_keep_their_order_and_none_comes_twice(indices):
    assert visible(",".join(map(str, indices)))[0] == list(dict.fromkeys(indices))


@given(st.text())
def test_whatever_stands_there_no_gpu_is_invented(value):
    assert set(visible(value)[0]) <= {0, 1, 2}


def split_board():
    return Board(
        UUIDS[0], instances=(Board("MIG-5a", free=9, total=10, part=3), Board("MIG-5b", free=18, total=20, part=4))
    )


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["MIG-5a", UUIDS[1]]),
        ("MIG-5b", ["MIG-5b"]),
        ("MIG-GPU-aa11-0/4/0", ["MIG-5b"]),
        ("MIG-5", []),
        ("0", ["MIG-5a"]),
        (UUIDS[0], ["MIG-5a"]),
        ("1,MIG-5b", [UUIDS[1], "MIG-5b"]),
    ],
)
def test_instances_of_a_gpu(value, uuids):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    gpus = read_gpus(env, Nvml(split_board(), Board(UUIDS[1])))
    assert [gpu.uuid for gpu in gpus.visible] == uuids
    assert all(gpu.mig == gpu.uuid.startswith("MIG") for gpu in gpus.visible)


def test_a_gpu_whose_instances_were_all_removed_cannot_be_used():
    nvml = Nvml(Board(UUIDS[0]))
    nvml.nvmlDeviceGetMigMode = lambda board: [1, 1]
    assert read_gpus({}, nvml).visible == ()
    assert visible("0", nvml) == ([], "0")


def test_what_is_said_of_a_gpu():
    board = Board(
        UUIDS[0],
        processes=[(os.getpid(), 3 * GIB), (2**22 + 1, None)],
        persistence=1,
        mode=3,
        ecc=2,
        pending=1,
        limit=350_000,
        usual=700_000,
        reasons=0x4 | 0x40,
    )
    seen = read_gpus({}, Nvml(board))
    (gpu,) = seen.visible
    assert (seen.driver, seen.installed, seen.problem) == ("580.65.06", 1, None)
    assert (gpu.total_bytes, gpu.free_bytes) == (80 * GIB - GIB // 2, 70 * GIB)
    assert (gpu.compute_mode, gpu.persistence, gpu.ecc_errors, gpu.remap_pending) == (
        "exclusive process",
        True,
        2,
        True,
    )
    assert (gpu.power_limit_w, gpu.power_default_w, gpu.slowed) == (350, 700, ("heat (hardware)",))
    here, elsewhere = gpu.processes
    assert here.name
    assert here.used_bytes == 3 * GIB
    assert (elsewhere.name, elsewhere.used_bytes) == (None, None)


def test_what_is_not_told_is_none_and_no_error():
    (gpu,) = read_gpus({}, Nvml(Board(UUIDS[0]))).visible
    assert (gpu.ecc_errors, gpu.persistence, gpu.compute_mode, gpu.power_limit_w) == (None, None, None, None)
    assert (gpu.processes, gpu.slowed) == ((), ())


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_no_gpu(error):
    gpus = read_gpus({}, Nvml(error=error))
    assert (gpus.visible, gpus.driver, gpus.problem) == ((), None, None)
    assert device_memory(dict(os.environ), "cuda", nvml=Nvml(error=error)) is None
    assert device_memory(dict(os.environ), "cpu", nvml=Nvml(error=error)) is not None


def test_a_driver_that_does_not_answer_is_told():
    assert "version mismatch" in read_gpus({}, Nvml(error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)).problem
    lost = Nvml(Board(UUIDS[0]), lost=True)
    assert "lost" in read_gpus({}, lost).problem
    assert device_memory({}, "cuda", nvml=lost) is None
    assert lost.open == 0


def test_the_fullest_of_the_visible_gpus_counts():
    nvml = three()
    assert device_memory({}, "cuda", nvml=nvml) == DeviceMemory(80 * GIB - GIB // 2, 50 * GIB, "nvml")
    assert device_memory({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda", nvml=nvml).free_bytes == 60 * GIB
    assert device_memory({"CUDA_VISIBLE_DEVICES": "1,2"}, "cuda", count=1, nvml=nvml).free_bytes == 60 * GIB
    assert nvml.open == 0


def test_an_old_driver_does_not_tell_apart_what_it_keeps():
    assert device_memory({}, "cuda", nvml=Nvml(Board(UUIDS[0]), old=True)) == DeviceMemory(80 * GIB, 70 * GIB, "nvml")


def test_a_gpu_without_memory_of_its_own_is_unknown():
    board = Board(UUIDS[0])
    board.memory = None
    assert device_memory({}, "cuda", nvml=Nvml(board, Board(UUIDS[1]))) is None


def test_whose_memory_it_is_depends_on_where_the_server_runs(tmp_path):
    machine(tmp_path)
    assert device_memory({}, "cpu", nvml=three(), root=tmp_path).source == "numa"
    assert device_memory({"CUDA_VISIBLE_DEVICES": ""}, "cuda", nvml=three(), root=tmp_path) is None
    assert device_memory({}, None, nvml=three(), root=tmp_path).source == "nvml"
    # An AMD GPU's memory is neither the host's nor that of an NVIDIA GPU beside it.
    assert device_memory({}, "rocm", nvml=three(), root=tmp_path) is None
    assert device_memory({}, None, nvml=Nvml(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), root=tmp_path) is None


NODE = """Node {node} MemTotal:       {total} kB
Node {node} MemFree:        1000 kB
Node {node} MemUsed:        7 kB
Node {node} Active:         99999 kB
Node {node} Active(file):   200 kB
Node {node} Inactive(file): 30 kB
Node {node} SReclaimable:   4 kB
Node {node} HugePages_Total:     0
"""
KIB = 1024


def machine(root, nodes=(0, 1), allowed="0-1", meminfo=True):
    """Two cores on each node; node n has (n + 1) * 10000 KiB."""
    write(root / "proc/self/status", f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    write(root / "proc/meminfo", "MemTotal: 50000 kB\nMemFree: 1 kB\nMemAvailable: 40000 kB\nHugePages_Total: 0\n")
    for node in nodes:
        for core in (2 * node, 2 * node + 1):
            (root / f"sys/devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
        if meminfo:
            text = NODE.format(node=node, total=(node + 1) * 10000)
            write(root / f"sys/devices/system/node/node{node}/meminfo", text)
    return root


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def seen(root, env=None, cores=(0, 1, 2, 3)):
    memory = node_memory(env or {}, root=root, cores=cores)
    return None if memory is None else (memory.total_bytes // KIB, memory.free_bytes // KIB)


def test_page_cache_and_reclaimable_slabs_are_free(tmp_path):
    assert seen(machine(tmp_path)) == (10000, 1234)


@pytest.mark.parametrize(
    ("env", "cores", "total"),
    [
        ({}, (2, 3), 20000),
        ({"CPU_VISIBLE_MEMORY_NODES": "1"}, (0, 1, 2, 3), 20000),
        ({"CPU_VISIBLE_MEMORY_NODES": "1,0"}, (0, 1, 2, 3), 20000),
        ({"CPU_VISIBLE_MEMORY_NODES": ""}, (0, 1, 2, 3), 10000),
        ({"CPU_VISIBLE_MEMORY_NODES": "1", "VLLM_CPU_SIM_MULTI_NUMA": "1"}, (0, 1, 2, 3), 10000),
        ({"VLLM_CPU_OMP_THREADS_BIND": "2-3"}, (0, 1, 2, 3), 20000),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}, (0, 1, 2, 3), 10000),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, (3,), 20000),
    ],
)
def test_the_node_that_the_first_worker_is_bound_to(tmp_path, env, cores, total):
    assert seen(machine(tmp_path), env, cores)[0] == total


def test_a_node_that_may_not_be_used_gives_way_to_the_first_that_may(tmp_path):
    assert seen(machine(tmp_path, allowed="1"), cores=(0, 1))[0] == 20000


@pytest.mark.parametrize("env", [{"CPU_VISIBLE_MEMORY_NODES": "7"}, {"CPU_VISIBLE_MEMORY_NODES": "x"}])
def test_nodes_that_do_not_exist_are_unknown(tmp_path, env):
    assert seen(machine(tmp_path), env) is None


def test_a_machine_without_nodes(tmp_path):
    assert seen(machine(tmp_path, meminfo=False)) == (50000, 40000)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": 5000 * KIB, "memory.current": 4500 * KIB}, (5000, 500)),
        ({"memory.max": 5000 * KIB, "memory.current": 6000 * KIB}, (5000, 0)),
        ({"memory.max": 5000 * KIB}, (5000, 1234)),
        ({"memory.max": "max", "memory.current": 4500 * KIB}, (10000, 1234)),
        ({"memory.max": 10001 * KIB, "memory.current": 10000 * KIB}, (10000, 1234)),
        ({"memory/memory.limit_in_bytes": 5000 * KIB, "memory/memory.usage_in_bytes": KIB}, (5000, 1234)),
        ({"memory/memory.limit_in_bytes": 9223372036854771712}, (10000, 1234)),
    ],
)
def test_the_limit_of_a_container(tmp_path, files, expected):
    machine(tmp_path)
    for name, value in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, f"{value}\n")
    assert seen(tmp_path) == expected


class OldNvml(Nvml):
    """A library that is older than its bindings, and a GPU whose name is no text."""

    def nvmlDeviceGetMemoryInfo(self, board, version=None):
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    def nvmlDeviceGetName(self, board):
        return b"\xff".decode()


def test_an_old_library_tells_what_it_can():
    nvml = OldNvml(Board(UUIDS[0], persistence=1))
    (gpu,) = read_gpus({}, nvml).visible
    assert (gpu.uuid, gpu.total_bytes, gpu.persistence) == (UUIDS[0], None, True)
    assert device_memory({}, "cuda", nvml=nvml) is None
    assert nvml.open == 0


def test_a_uuid_that_is_no_text_is_a_problem_of_the_driver():
    class Nvml2(Nvml):
        def nvmlDeviceGetUUID(self, board):
            return b"\xff".decode()

    nvml = Nvml2(Board(UUIDS[0]))
    assert "decode" in read_gpus({}, nvml).problem
    assert device_memory({}, "cuda", nvml=nvml) is None


def test_this_machine_has_memory():
    memory = node_memory(dict(os.environ))
    assert memory is not None
    assert 0 < memory.free_bytes <= memory.total_bytes
