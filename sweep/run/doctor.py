"""`doctor`: what would break at 3 a.m., told before: a line for each thing, what was seen of it, and what to do."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sweep.run.doctor_line import Check, failure, warning
from sweep.run.doctor_packages import check_packages
from sweep.text import printable

_RESULTS = Path("results")
# For all questions together, which are asked at the same time. A driver or a network share can hang for ever.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What a search space says of it; without one, the default command and no model. connections: at the same time."""

    command: tuple[str, ...] = ("vllm", "serve")
    model: str | None = None
    revision: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None  # of models, where a flag names one
    connections: int = 0


def doctor_document(space: Path | None) -> dict[str, Any]:
    """Look at this machine, and with a search space at what that needs. Raises ConfigError for a bad space.

    Returns {"ok": no failure, "checks": [{"name", "status", "seen", "remedy"}], "space": its path or None}.
    """
    checks = check_packages()
    if all(check.status != "failure" for check in checks):
        checks += _examine(_subject(space), given=space is not None)
    return {
        "ok": all(check.status != "failure" for check in checks),
        "checks": [{key: value and printable(value) for key, value in asdict(check).items()} for check in checks],
        "space": None if space is None else str(space),
    }


def doctor_text(document: dict[str, Any]) -> str:
    checks = document["checks"]
    width = max(len(check["name"]) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check['status']:<7}  {check['name']:<{width}}  {check['seen']}")
        if check["remedy"]:
            lines.append(f"{'':<{9 + width}}  -> {check['remedy']}")
    return "\n".join([*lines, *_verdict(document)])


def _verdict(document: dict[str, Any]) -> list[str]:
    statuses = [check["status"] for check in document["checks"]]
    counts = ", ".join(_counted(statuses.count(status), status) for status in ("failure", "warning"))
    space = document["space"]
    hint = [f"The flags were not looked at: `check {printable(space)}` reads them."] if space else []
    return ["", f"{counts[0].upper()}{counts[1:]}.", *hint]


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' if number > 1 else ''}"


def _subject(space: Path | None) -> Subject:
    if space is None:
        return Subject()
    from sweep.config import load_config  # noqa: PLC0415 - its packages have just been found to be there

    config = load_config(space, [])
    serve = config.serve
    cache = serve.args.get("download-dir")
    return Subject(
        serve.command,
        serve.model,
        serve.revision,
        serve.env,
        cache if isinstance(cache, str) else None,
        max((level.concurrency or 0 for level in config.load.levels()), default=0),
    )


def _examine(subject: Subject, *, given: bool) -> list[Check]:
    # Only here, where the packages that they import are known to be there.
    from sweep.run import (  # noqa: PLC0415
        doctor_checks as programs,
        doctor_facts as facts,
        doctor_host as host,
        doctor_model as hub,
    )
    from sweep.serve.device import read_gpus  # noqa: PLC0415

    env = {**os.environ, **subject.env}
    cache = Path(subject.cache) if subject.cache else hub.hub_cache(env)
    places = {
        "results": _RESULTS,
        "models": cache,
        "vLLM's cache": hub.home_path(env.get("VLLM_CACHE_ROOT") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/vllm"),
        "temporary files": Path(tempfile.gettempdir()),
    }
    questions: dict[str, Callable[[], Any]] = {
        "serving": lambda: facts.serving(subject.command, subject.env, given=given),
        "gpus": lambda: read_gpus(env),
        "leftovers": facts.leftovers,
        "ports": facts.ports,
        "disks": lambda: facts.disks(places),
        "results": lambda: facts.folder(_RESULTS),
        "shm": facts.shared_memory,
        "open files": facts.open_files,
        "memory": facts.host_memory,
        "cores": facts.cores,
    }
    if subject.model is not None:
        model = subject.model
        questions["model"] = lambda: hub.find_model(model, subject.revision, env, cache)
    seen = gather(questions)
    load = subject.connections
    return [
        *seen.line(programs.check_command, "serving"),
        *seen.line(programs.check_vllm, "serving"),
        *seen.line(programs.check_gpus, "gpus", "serving"),
        *seen.line(programs.check_driver, "gpus", "serving"),
        *seen.line(programs.check_leftovers, "leftovers"),
        *seen.line(hub.check_model, "model"),
        *seen.line(lambda ports: host.check_ports(ports, load), "ports"),
        *seen.line(lambda disks: [line for disk in disks for line in host.check_disk(disk)], "disks"),
        *seen.line(host.check_results, "results"),
        *seen.line(lambda shm, gpus: host.check_shared_memory(shm, len(gpus.visible)), "shm", "gpus"),
        *seen.line(lambda hard: host.check_open_files(hard, load), "open files"),
        *seen.line(host.check_memory, "memory"),
        *seen.line(host.check_cores, "cores"),
        *seen.unanswered(),
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """Answers by question, and by question why there is none."""

    answers: dict[str, Any]
    silent: dict[str, str]

    def line(self, judge: Callable[..., list[Check]], *needs: str) -> list[Check]:
        """Judge answers; nothing is judged where one of them is wanting."""
        return judge(*(self.answers[need] for need in needs)) if all(need in self.answers for need in needs) else []

    def unanswered(self) -> list[Check]:
        found = []
        for name, why in self.silent.items():
            complain = failure if name == "gpus" else warning
            found += complain(name, f"not known: {why}", "Look at this by hand; what hangs may need a reboot.")
        return found


def gather(questions: Mapping[str, Callable[[], Any]], patience_s: float = _PATIENCE_S) -> Seen:
    """Ask all questions at the same time, and wait no longer than that for any of them."""
    answers: dict[str, Any] = {}
    silent: dict[str, str] = dict.fromkeys(questions, f"no answer within {patience_s:.0f} s")

    def ask(name: str, question: Callable[[], Any]) -> None:
        try:
            answers[name] = question()
        except Exception as error:  # noqa: BLE001 - one question that goes wrong must not hide the other answers
            silent[name] = f"{type(error).__name__}: {error}"

    # Threads that nobody waits for: one that hangs in the driver cannot be ended.
    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in questions.items()]
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    known = dict(answers)  # a thread that is late may still write
    return Seen(known, {name: why for name, why in silent.items() if name not in known})
