"""Sockets that know when their bytes arrived, as the kernel saw it: delays of the client do not reach the stamps."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from sweep.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("@qq")
_SPACE = socket.CMSG_SPACE(_TIMESPEC.size)
_NS = 1_000_000_000
# What asyncio asks for, 256 KiB, is mapped and unmapped by the allocator for every read: half of a read's cost.
_READ_BYTES = 65_536


class StampClock:
    """Turns the kernel's wall-clock stamps into `perf_counter_ns`; counts the reads without one."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self.kernel_reads = 0
        self.bare_reads = 0
        self.synchronise()

    def synchronise(self) -> None:
        """Measure the distance of the two clocks again; the smallest of some tries was disturbed least."""
        self.offset_ns = min(time.time_ns() - time.perf_counter_ns() for _ in range(50))

    def stamp(self, ancillary: list[tuple[int, int, bytes]], now: int) -> int:
        """Return the arrival time that came with a read, or the time of the read, now, where none came."""
        for _, kind, data in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(data[: _TIMESPEC.size])
                arrived: int = seconds * _NS + nanoseconds - self.offset_ns
                if arrived > now - _NS:  # further back, the clock was set rather than the client late
                    self.kernel_reads += 1
                    return min(arrived, now)
        self.bare_reads += 1
        return now

    @property
    def source(self) -> Literal["kernel", "protocol", "wakeup"]:
        """Where the stamps come from: the kernel, the read, or (an event loop that reads by itself) neither."""
        return stamp_source(self.kernel_reads, self.bare_reads)


def stamp_source(kernel_reads: int, bare_reads: int) -> Literal["kernel", "protocol", "wakeup"]:
    """Tell what stamps are by how many reads had one of the kernel's and how many had none."""
    if kernel_reads + bare_reads == 0:
        return "wakeup"
    return "kernel" if bare_reads <= kernel_reads // 10 else "protocol"


class StampedSocket(socket.socket):
    """`received_ns`: arrival of the latest read's last byte. `waited_ns`: from then to the read; None without a stamp.

    `sent_ns`: first byte written since then. All stamps are 0 before the first.
    """

    __slots__ = ("_answered", "_clock", "received_ns", "sent_ns", "waited_ns")

    def __init__(self, clock: StampClock, family: int, kind: int, proto: int) -> None:
        super().__init__(family, kind, proto)
        self._clock = clock
        self._answered = True
        self.received_ns = 0
        self.waited_ns: int | None = None
        self.sent_ns = 0
        try:
            self.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError:  # not Linux: the stamp is then the time of the read
            return

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data, ancillary, _, _ = self.recvmsg(min(bufsize, _READ_BYTES), _SPACE, flags)
        if data:  # the end of the stream has no stamp
            self._note(ancillary)
        return data

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)[: nbytes or None]
        count, ancillary, _, _ = self.recvmsg_into([view], _SPACE, flags)
        if count:
            self._note(ancillary)
        return count

    def _note(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        now = time.perf_counter_ns()
        self.received_ns = at = self._clock.stamp(ancillary, now)
        self.waited_ns = now - at if at < now else None
        self._answered = True

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        if self._answered:
            self._answered = False
            self.sent_ns = time.perf_counter_ns()
        return super().send(data, flags)

    def sendmsg(self, buffers: Iterable[ReadableBuffer], *args: Any) -> int:
        if self._answered:  # long bodies go this way in newer versions of asyncio
            self._answered = False
            self.sent_ns = time.perf_counter_ns()
        return super().sendmsg(buffers, *args)


def allow_open_files(connections: int | None) -> None:
    """Raise the limit on open files as far as this process may; ConfigError where it does not reach.

    connections: how many are open at the same time; None where nobody can know.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (connections or 0) + 128  # the program's own files
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, needed, 65536)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if needed > hard:
        raise ConfigError(
            f"load.concurrency: {connections} connections and {needed - (connections or 0)} other files are {needed}"
            f" open files, but this process may have {hard}; raise the limit (ulimit -Hn) or lower the concurrency"
        )
