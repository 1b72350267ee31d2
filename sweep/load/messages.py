"""What the process that conducts a level and the processes that carry it say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sweep.load.prompts import PromptSource
from sweep.load.wire import Target
from sweep.load.workload import Level, LoadSection
from sweep.model import RequestRecord


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process of the client is to do. share: (index, of); it takes every of-th conversation, from its index on.

    requests: how many of them it counts in a closed loop; None where window_s decides.
    misses: tells of a finished request which limits it missed, for a judge.
    """

    level: Level
    load: LoadSection
    prompts: PromptSource
    target: Target
    run_id: str
    share: tuple[int, int]
    slots: int | None
    stagger_s: float
    bin_s: float
    requests: int | None
    misses: Callable[[RequestRecord], Mapping[str, bool]] | None = None


@dataclass(slots=True)
class Progress:
    """How far a process has come, in sums since the start.

    flight_ns: integral of the number of requests under way. judged: limit -> (requests judged, missed).
    """

    bins: int = 0
    bytes: int = 0
    flight_ns: int = 0
    slots_done: int = 0
    due: int = 0
    open: int = 0
    judged: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_counted_end_ns: int = 0
    done: bool = False  # everything that it counts has been counted and has ended
    ended_early: Literal["stalled", "failing", "behind"] | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a process. salt: of the prefix cache."""

    orders: Orders
    salt: str


@dataclass(frozen=True, slots=True)
class Command:
    """A later message. start: at_ns. open: at_ns, and until_ns if known. close: at_ns. finish: patience_s."""

    name: Literal["start", "open", "close", "finish"]
    at_ns: int = 0
    until_ns: int | None = None
    patience_s: float = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The last message of a process. cpu_s: from the start of the load, decoding included."""

    records: list[RequestRecord]
    drained: bool
    cpu_s: float
    wall_s: float
    kernel_reads: int
    bare_reads: int
    loop_lag_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a process: it has understood its orders."""
