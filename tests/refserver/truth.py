"""What the server did, and when: all stamps are `perf_counter_ns`, which all processes of a host share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Entry:
    """One request. writes: (stamp taken just before the write, tokens); scheduled_ns: when each of them was due.

    received_ns: the kernel's stamp of the request's last byte.
    """

    ordinal: int
    x_request_id: str
    endpoint: str
    scenario: str
    expected: str
    prompt_tokens: int
    asked_tokens: int
    accepted_ns: int
    received_ns: int
    writes: list[tuple[int, int]] = field(default_factory=list)
    scheduled_ns: list[int] = field(default_factory=list)
    ended: str = "open"  # done, hung, or left by the client
    ended_ns: int = 0

    def document(self) -> dict[str, Any]:
        return {
            "ordinal": self.ordinal,
            "x_request_id": self.x_request_id,
            "endpoint": self.endpoint,
            "scenario": self.scenario,
            "expected": self.expected,
            "prompt_tokens": self.prompt_tokens,
            "asked_tokens": self.asked_tokens,
            "tokens": sum(count for _, count in self.writes),
            "accept_ns": self.accepted_ns,
            "recv_ns": self.received_ns,
            "writes": self.writes,
            "scheduled_ns": self.scheduled_ns,
            "ended": self.ended,
            "end_ns": self.ended_ns,
        }


class Truth:
    """The log of all requests since the last reset, and of the server's own lateness.

    Of writes that are due at the same time only the first tells how late the server is: the others wait for it.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ordinal = 0  # goes on over resets: schedules differ
        self._late_ns = array("q")
        self._write_ns = array("q")
        self._last_due_ns = 0

    def reset(self) -> None:
        self.entries = []
        self._late_ns = array("q")
        self._write_ns = array("q")

    def note_write(self, due_ns: int, before_ns: int, after_ns: int) -> None:
        if due_ns != self._last_due_ns:
            self._late_ns.append(before_ns - due_ns)
            self._last_due_ns = due_ns
        self._write_ns.append(after_ns - before_ns)

    def document(self) -> dict[str, Any]:
        return {
            "clock": "perf_counter_ns",
            "recv_source": "kernel",
            "lateness_ms": _quantiles_ms(self._late_ns),
            "write_ms": _quantiles_ms(self._write_ns),  # how long the writes took; long ones were interrupted
            "requests": [entry.document() for entry in self.entries],
        }


def _quantiles_ms(values: array[int]) -> dict[str, float | int] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"n": len(ordered)} | {f"p{q}": ordered[round(last * q / 100)] / 1e6 for q in (50, 99, 100)}
