"""An event loop for one purpose: to do things at their time. epoll for sockets, one heap and a timerfd for deadlines.

asyncio's timers are coarse (epoll counts milliseconds, and so does uvloop), and its transports may write later than
they are told to.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import select
import time
from collections.abc import Callable
from itertools import count

_NS = 1_000_000_000
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_SPIN_NS = 250_000  # a sleeping process is woken up to about this late


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _Alarm:
    """A timerfd on CLOCK_MONOTONIC, the clock of `perf_counter_ns`. Python has these from 3.13 on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()
        self._set_ns = 0

    def set(self, at_ns: int) -> None:
        if at_ns != self._set_ns:
            self._set_ns = at_ns
            self._spec.value.seconds, self._spec.value.nanoseconds = divmod(at_ns, _NS)
            self._libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def clear(self) -> None:
        self._set_ns = 0
        os.read(self.fd, 8)


class Reactor:
    """Calls what is due, and what has bytes. Nothing fires while it is frozen; what was due then fires at the thaw."""

    def __init__(self) -> None:
        self.frozen_until_ns = 0
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._numbers = count()
        self._alarm = _Alarm()
        self.watch(self._alarm.fd, select.EPOLLIN, lambda _events: self._alarm.clear())

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def at(self, due_ns: int, call: Callable[[int], None]) -> None:
        """Have `call(due_ns)` done at `due_ns`; due_ns is the end of a freeze if it lies within one."""
        heapq.heappush(self._heap, (due_ns, next(self._numbers), call))

    def run(self) -> None:
        """Run until an exception, such as the SystemExit of a signal, ends it."""
        while True:
            self._fire()
            for fd, events in self._epoll.poll(self._wait()):
                handler = self._handlers.get(fd)
                if handler is not None:  # else an earlier one of this round has closed it
                    handler(events)

    def _fire(self) -> None:
        heap = self._heap
        while heap:
            now = time.perf_counter_ns()
            frozen = self.frozen_until_ns
            if now < frozen or heap[0][0] > now:
                return
            due, _, call = heapq.heappop(heap)
            call(max(due, frozen))

    def _wait(self) -> int | None:
        """Return how long epoll may wait: until the alarm, or not at all."""
        if not self._heap:
            return None
        due = max(self._heap[0][0], self.frozen_until_ns) - _SPIN_NS
        if due <= time.perf_counter_ns():
            return 0
        self._alarm.set(due)
        return None
