"""What to try next: a study that is told every outcome and asked for flags. The only importer of optuna.

Optuna's samplers learn from different states: none sees a failed trial, the Gaussian process sees only complete ones.
So there are two Optuna studies. The record is a SQLite file for people and their dashboards, with the states as they
were: complete, pruned (the configuration cannot run), failed (nobody knows). The view is built in memory for every
question: there, a configuration that cannot run is complete with the worst value that was measured (an outlier would
bend the model) and a violated constraint, which both samplers read rightly. Nothing but finished trials is ever
written to the record, so a crash leaves nothing half done in it, and it can be built again from the outcomes.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweep.errors import ConfigError, MachineError
from sweep.model import Flags, FlagValue, Outcome, Source, State, Verdict
from sweep.search.objectives import Objective
from sweep.search.space import SamplerName, SearchSection, Space

Point: TypeAlias = tuple[int, ...]  # an index into the values of each flag, in the order of the space

# Trials drawn evenly over the space before a model is asked; it is not worth more of a night of a few dozen trials.
_MAX_STARTUP = 8
# Up to this size, all points of a space are looked at for a free one; beyond, a sample of them.
_ENUMERABLE = 4096
_DRAWS = 1000
_LOCK_TIMEOUT_S = 60.0  # a dashboard may hold the database for a while

_RECORD_STATES: dict[State, TrialState] = {
    "complete": TrialState.COMPLETE,
    "infeasible": TrialState.PRUNED,
    "skipped": TrialState.PRUNED,
    "pruned": TrialState.PRUNED,
    "invalid": TrialState.FAIL,
    "failed": TrialState.FAIL,
    "interrupted": TrialState.FAIL,
}


@dataclass(frozen=True, slots=True)
class Proposal:
    """Flags to try. violation: the rule that forbids them, where nothing else was found; they need no launch."""

    token: int
    flags: Flags
    source: Source = "search"
    violation: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """What a trial taught. value: only of a measured one; constraints: above 0 is violated, all of magnitude 1."""

    point: Point
    state: State
    value: float | None
    constraints: dict[str, float]

    @property
    def informs(self) -> bool:
        """Whether it says anything about the configuration."""
        return self.value is not None or _RECORD_STATES[self.state] == TrialState.PRUNED


class Study:
    """Asked for flags and told what became of them. One coordinator uses it; it is no lock between processes."""

    def __init__(
        self,
        record: optuna.Study,
        storage: optuna.storages.RDBStorage,
        space: Space,
        objective: Objective,
        section: SearchSection,
    ) -> None:
        self.objective = objective
        self.sampler = resolve_sampler(section.sampler)
        self._record = record
        self._storage = storage
        self._space = space
        self._seed = section.seed
        self._sizes = [param.size for param in space.params.values()]
        self._distributions = _distributions(space)
        self._known: dict[int, _Known] = {}
        self._pending: dict[int, Point] = {}
        self._asked = 0
        self._twins: dict[str, dict[int, int]] = {}  # of a flag: index -> the index that stands for it

    @classmethod
    def open(cls, db: Path, name: str, space: Space, objective: Objective, section: SearchSection) -> Study:
        """Open the record, or begin one. What the study knows comes from `replay`, not from the record."""
        try:
            with closing(sqlite3.connect(db, timeout=_LOCK_TIMEOUT_S)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")  # readers then never block the writer
        except sqlite3.DatabaseError as error:
            raise MachineError(
                f"{db}: {error}. Move this file away and start again: it is built anew from the trials' own files."
            ) from None
        with _quiet():
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{db}", engine_kwargs={"connect_args": {"timeout": _LOCK_TIMEOUT_S}}
            )
            record = optuna.create_study(
                storage=storage, study_name=name, direction=objective.direction, load_if_exists=True
            )
        if record.direction.name.lower() != objective.direction:
            raise ConfigError(
                f"{db}: this study was begun to {record.direction.name.lower()} its objective, not to"
                f" {objective.direction} it; choose another run.name"
            )
        return cls(record, storage, space, objective, section)

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def replay(self, known: Iterable[tuple[Outcome, Verdict, Flags | None]]) -> None:
        """Take up all outcomes so far, each with the point of the space that it stands for, and complete the record."""
        with _quiet():
            recorded = {trial.user_attrs.get("trial") for trial in self._record.get_trials(deepcopy=False)}
        self._known = {}
        for outcome, verdict, flags in known:
            point = None if flags is None else self._space.point(flags)
            if point is not None:
                self._learn(outcome, verdict, point, record=outcome.trial not in recorded)

    def tell(self, outcome: Outcome, verdict: Verdict, *, token: int | None = None, point: Flags | None = None) -> None:
        """Learn from an outcome.

        point: the swept flags as they really were; without it, those of the proposal. An outcome that is no point of
        the space teaches nothing.
        """
        proposed = None if token is None else self._pending.pop(token, None)
        indices = proposed if point is None else self._space.point(point)
        if indices is not None:
            self._learn(outcome, verdict, indices, record=True)

    def take_as_one(self, groups: Mapping[str, Iterable[Sequence[FlagValue]]]) -> None:
        """Of each group of a flag's values, which do the same, try only the first from now on.

        What is known of the others counts as known of the first.
        """
        self._twins = {}
        for name, alike in groups.items():
            places = [[self._space.params[name].index(value) for value in values] for values in alike]
            self._twins[name] = {
                i: group[0] for group in places for i in group if i is not None and group[0] is not None
            }

    def ask(self, avoid: Callable[[Flags], object] | None = None) -> Proposal | None:
        """Propose flags that are not known yet; None when the space has no others.

        avoid: says of flags whether to pass them over. Without it, flags that cannot run may be proposed, and teach
        the sampler something when it is told so.
        Takes up to some seconds with the Gaussian process. What it answers depends on the seed, on what is known and
        on how many questions are open, so a resumed study goes on as if it had not been stopped.
        """
        turn = len(self._known) + len(self._pending)
        rng = np.random.default_rng([self._seed, turn])
        wanted = self._single(self._wanted(turn, rng))
        taken = {self._single(known.point) for known in self._known.values() if known.state != "interrupted"}
        taken.update(self._pending.values())

        def free(point: Point) -> bool:
            if point in taken or point != self._single(point) or self._forbidden(point):
                return False
            return avoid is None or not avoid(self._space.flags(point))

        point = next((p for p in self._nearest(wanted, rng) if free(p)), None)
        if point is None:
            if wanted in taken or self._space.size <= _ENUMERABLE:
                return None
            point = wanted
        self._asked += 1
        self._pending[self._asked] = point
        return Proposal(self._asked, self._space.flags(point), violation=self._forbidden(point))

    def withdraw(self, token: int) -> None:
        """Forget a proposal that is not tried now; it may be made again."""
        self._pending.pop(token, None)

    def _single(self, point: Point) -> Point:
        """Return the point that stands for all that do the same."""
        if not self._twins:
            return point
        return tuple(
            self._twins.get(name, {}).get(index, index) for name, index in zip(self._space.params, point, strict=True)
        )

    def _forbidden(self, point: Point) -> str | None:
        return self._space.violated(self._space.flags(point))

    def _wanted(self, turn: int, rng: np.random.Generator) -> Point:
        startup = min(_MAX_STARTUP, 2 + len(self._sizes))
        if self.sampler != "random" and turn < startup:
            return self._spread(turn, startup)
        if self.sampler == "random" or all(known.value is None for known in self._known.values()):
            return tuple(rng.integers(self._sizes).tolist())
        return self._modelled(int(rng.integers(2**32)))

    def _spread(self, row: int, rows: int) -> Point:
        """Return a row of a Latin hypercube: over all rows, every flag goes through its whole range evenly."""
        rng = np.random.default_rng(self._seed)
        columns = [rng.permutation(rows) for _ in self._sizes]
        return tuple(int((column[row] + 0.5) / rows * size) for column, size in zip(columns, self._sizes, strict=True))

    def _modelled(self, seed: int) -> Point:
        """Return what Optuna's sampler would try next."""
        with _quiet():
            sampler = (
                optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
                if self.sampler == "gp"
                else optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
            )
            view = optuna.create_study(sampler=sampler, direction=self.objective.direction)
            view.add_trials(self._view())
            params = view.ask(dict(self._distributions)).params
        return tuple(
            params[name] if isinstance(distribution, IntDistribution) else distribution.choices.index(params[name])
            for name, distribution in self._distributions.items()
        )

    def _view(self) -> list[FrozenTrial]:
        """Return all that is known in the form that every sampler learns from."""
        informing = [known for known in self._known.values() if known.informs]
        values = [known.value for known in informing if known.value is not None]
        worst = min(values) if self.objective.direction == "maximize" else max(values)
        finished = [
            create_trial(
                params=self._params(self._single(known.point)),
                distributions=dict(self._distributions),
                value=worst if known.value is None else known.value,
                constraints=known.constraints,
            )
            for known in informing
        ]
        running = [
            create_trial(state=TrialState.RUNNING, params=self._params(point), distributions=dict(self._distributions))
            for point in self._pending.values()
        ]
        return finished + running

    def _nearest(self, wanted: Point, rng: np.random.Generator) -> Iterator[Point]:
        """Give the wanted point, then others, the nearest first: all of a small space, a sample of a large one."""
        yield wanted
        if self._space.size <= _ENUMERABLE:
            others = list(product(*(range(size) for size in self._sizes)))
        else:
            others = [tuple(draw) for draw in rng.integers(self._sizes, size=(_DRAWS, len(self._sizes))).tolist()]
            others += [
                (*wanted[:i], wanted[i] + step, *wanted[i + 1 :])
                for i, size in enumerate(self._sizes)
                for step in (-2, -1, 1, 2)
                if 0 <= wanted[i] + step < size
            ]
        order = rng.permutation(len(others))  # so that equally near points have equal chances
        yield from sorted((others[i] for i in order), key=lambda point: self._distance(point, wanted))

    def _distance(self, a: Point, b: Point) -> float:
        """Sum over the flags: the share of its range for an ordered one, 1 for another value of an unordered one."""
        return sum(
            (abs(i - j) / max(param.size - 1, 1) if param.ordered else 1.0) if i != j else 0.0
            for i, j, param in zip(a, b, self._space.params.values(), strict=True)
        )

    def _params(self, point: Point) -> dict[str, Any]:
        """Return a point as Optuna has it: the index of an ordered flag, the value of another one as JSON."""
        return {
            name: index if isinstance(distribution, IntDistribution) else distribution.choices[index]
            for (name, distribution), index in zip(self._distributions.items(), point, strict=True)
        }

    def _learn(self, outcome: Outcome, verdict: Verdict, point: Point, *, record: bool) -> None:
        value = verdict.value if outcome.state == "complete" else None
        known = _Known(point, outcome.state, value, self._constraints(outcome, verdict))
        self._known[outcome.trial] = known
        if record:
            with _quiet():
                self._record.add_trial(self._recorded(known, outcome))

    def _constraints(self, outcome: Outcome, verdict: Verdict) -> dict[str, float]:
        """Return the same keys for every trial, since the Gaussian process goes by their position.

        launch: can the configuration run at all? Then, for each SLO, how far it was missed or met. A ratio becomes a
        number between -1 and 1 that still grows at fifty times the limit; what was not measured stands at the limit.
        """
        ratios = self.objective.ratios(verdict.level) if verdict.level else {}
        limits = {name: ratios.get(name, 1.0) for name in self.objective.slo}
        runs = outcome.state not in {"infeasible", "skipped"}
        return {
            "launch": -1.0 if runs else 1.0,
            **{name: ratio - 1 if ratio <= 1 else 1 - 1 / ratio for name, ratio in limits.items()},
        }

    def _recorded(self, known: _Known, outcome: Outcome) -> FrozenTrial:
        """Return the trial as the record keeps it, with the flags, our number and what went wrong as attributes."""
        failure = outcome.measured.failure
        attributes = {
            "trial": outcome.trial,
            "state": outcome.state,
            "source": outcome.source,
            "flags": json.dumps(outcome.flags),
            **({"failure": failure.kind, "evidence": failure.evidence} if failure else {}),
        }
        state = _RECORD_STATES[outcome.state]
        trial = create_trial(
            state=TrialState.FAIL if state == TrialState.COMPLETE and known.value is None else state,
            params=self._params(known.point),
            distributions=dict(self._distributions),
            value=known.value,
            constraints=known.constraints,
            user_attrs=attributes,
        )
        times = outcome.measured.times
        took_s = sum(part or 0.0 for part in (times.launch_s, times.warmup_s, times.load_s, times.stop_s))
        # Optuna keeps local times without a zone.
        trial.datetime_start = datetime.fromisoformat(outcome.started_at).astimezone().replace(tzinfo=None)
        trial.datetime_complete = trial.datetime_start + timedelta(seconds=took_s)
        return trial


def resolve_sampler(name: SamplerName) -> Literal["tpe", "gp", "random"]:
    """Choose for "auto": the Gaussian process where its libraries are installed, else TPE."""
    installed = find_spec("scipy") is not None and find_spec("torch") is not None
    if name == "auto":
        return "gp" if installed else "tpe"
    if name == "gp" and not installed:
        raise ConfigError("search.sampler: gp needs scipy and torch; pip install 'vllm-sweep[gp]', or write auto")
    return name


def _distributions(space: Space) -> dict[str, IntDistribution | CategoricalDistribution]:
    return {
        name: IntDistribution(0, param.size - 1)
        if param.ordered
        else CategoricalDistribution([json.dumps(value, sort_keys=True) for value in param.values()])
        for name, param in space.params.items()
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's log lines and its remarks on experimental features off the terminal, here and nowhere else."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        logger.setLevel(level)
