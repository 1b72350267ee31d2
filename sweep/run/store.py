"""A study's folder. Its outcome files are the truth; the database, the tables and the report are derived from them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from sweep.config import SweepConfig
from sweep.errors import ConfigError, LockedError, MachineError
from sweep.files import write_atomic
from sweep.model import Flags, Job, Outcome, Source
from sweep.run.workload import workload_changes

# What makes two runs the same study: results may only be mixed while all of these stay as they are.
_FINGERPRINT_SECTIONS = ("serve", "search", "load", "measure")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spec:
    """What `spec.json` keeps of a trial that is about to begin: all that is needed to run it again."""

    job: Job
    source: Source
    flags: Flags
    started_at: str
    label: str | None = None
    attempt: int = 1


class Store:
    """The files of one study. Only the holder of `lock()` may write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def database(self) -> Path:
        return self.root / "study.db"

    def exists(self) -> bool:
        return (self.root / "config.yaml").is_file()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study for this process. Raises LockedError naming the holder."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MachineError(f"{self.root}: cannot be written: {error.strerror}") from None
        with os.fdopen(handle, "r+") as file:
            if not _locked(file):
                holder = file.read().strip() or "an unknown process"
                raise LockedError(f"{self.root}: another sweep works on this study ({holder})")
            file.truncate(0)
            file.write(f"pid {os.getpid()}\n")
            file.flush()
            yield

    def trial_dir(self, trial: int) -> Path:
        return self.root / "trials" / f"{trial:04d}"

    def begin(self, config: SweepConfig, environment: dict[str, Any], workload: dict[str, Any]) -> None:
        """Keep what the study was told, what it sends and where it runs; refuse to mix it with a different study.

        Raises ConfigError showing what differs.
        """
        told = config.model_dump(mode="json")
        if not self.exists() and any(self.root.glob("trials/*/outcome.json")):
            raise ConfigError(
                f"{self.root} holds trials but no config.yaml, so nobody can tell what they are of."
                " Bring the file back, choose another run.name, or move that folder away."
            )
        if self.exists():
            self._refuse_another(told, environment["fingerprint"], workload)
        write_atomic(self.root / "environment.json", json.dumps(environment, indent=2, sort_keys=True) + "\n")
        write_atomic(self.root / "workload.json", json.dumps(workload, indent=2, sort_keys=True) + "\n")
        text = "# What this study was told, with every default filled in.\n"
        write_atomic(self.root / "config.yaml", text + yaml.safe_dump(told, sort_keys=False, allow_unicode=True))

    def _refuse_another(self, told: dict[str, Any], now: dict[str, Any], workload: dict[str, Any]) -> None:
        kept, before = self.config_data(), self.environment().get("fingerprint", {})
        different = sorted(
            f"{section}: {_first_difference(kept.get(section), told[section])}"
            for section in _FINGERPRINT_SECTIONS
            if kept.get(section) != told[section]
        )
        if not different:  # other settings plan other requests anyway
            different += workload_changes(self.workload(), workload)
        # What could not be found out this time is no difference.
        changed = [key for key in before if before[key] != now.get(key) and None not in (before[key], now.get(key))]
        different += [f"{key}: was {before[key]!r}, is {now[key]!r}" for key in changed]
        if different:
            raise ConfigError(
                f"{self.root} holds a study that differs from this one:\n  "
                + "\n  ".join(different)
                + "\nResults of both would be mixed. Choose another run.name, or move that folder away."
            )

    def config_data(self) -> dict[str, Any]:
        try:
            data = yaml.safe_load((self.root / "config.yaml").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.root}: no study there (no config.yaml)") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.root / 'config.yaml'}: damaged: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{self.root / 'config.yaml'}: damaged: not a mapping")
        return data

    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    def workload(self) -> dict[str, Any]:
        return self._json("workload.json")

    def write_end(self, trials: int, *, complete: bool, notes: Sequence[str]) -> None:
        """Keep how the last call of the sweep ended, with `trials` outcomes; `report` cannot know it from these."""
        document = {"trials": trials, "complete": complete, "notes": list(notes)}
        write_atomic(self.root / "end.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def end(self, trials: int) -> tuple[bool, list[str]] | None:
        """Return whether the study was complete, and the notes, if there have been no more outcomes since."""
        end = self._json("end.json")
        if end.get("trials") != trials:
            return None
        return bool(end.get("complete")), [str(note) for note in end.get("notes", ())]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.root / name
        if not path.is_file():
            return {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: damaged: {error}; remove it, it is made again") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: damaged: not a mapping; remove it, it is made again")
        return data

    def start_trial(self, spec: Spec) -> None:
        """Make the trial's folder and write its spec. A folder that an interrupted start left is made anew."""
        folder = self.trial_dir(spec.job.trial)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_atomic(folder / "spec.json", _pretty(TypeAdapter(Spec).dump_python(spec, mode="json")))

    def write_outcome(self, outcome: Outcome) -> None:
        folder = self.trial_dir(outcome.trial)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "outcome.json", _pretty(TypeAdapter(Outcome).dump_python(outcome, mode="json")))

    def outcomes(self) -> list[Outcome]:
        """Return every finished trial in order of its number. Raises ConfigError for a damaged file."""
        found = [_read(TypeAdapter(Outcome), path) for path in sorted(self.root.glob("trials/*/outcome.json"))]
        return sorted(found, key=lambda outcome: outcome.trial)

    def unfinished(self) -> list[Spec]:
        """Return the trials that were begun and have no outcome: the process died in the middle of them."""
        paths = sorted(self.root.glob("trials/*/spec.json"))
        return [_read(TypeAdapter(Spec), path) for path in paths if not path.with_name("outcome.json").exists()]


def _read(adapter: TypeAdapter[T], path: Path) -> T:
    try:
        return adapter.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(
            f"{path}: damaged ({error.error_count()} errors); remove the folder to repeat the trial"
        ) from None


def _locked(file: IO[str]) -> bool:
    """Take the lock. Whoever only asks whether it is taken (`status`) has it for a moment, so a few tries are made."""
    for _ in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        else:
            return True
    return False


def _pretty(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _first_difference(before: Any, after: Any, key: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(n for n in after if n not in before)]:
            if before.get(name) != after.get(name):
                return _first_difference(before.get(name), after.get(name), f"{key}.{name}".lstrip("."))
    return f"{key}{': ' if key else ''}was {before!r}, is {after!r}"
