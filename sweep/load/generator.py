"""One process of the load client: `python -m sweep.load.generator`, with its orders on stdin. It does nothing else.

Its stdin is its lease: when that closes, the load ends and the process leaves.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import numpy as np

from sweep.children import packed, receive
from sweep.load.messages import Command, Progress, Ready, Result, Setup
from sweep.load.stamps import StampClock, allow_open_files
from sweep.load.traffic import Traffic
from sweep.load.wire import Meter, open_wire

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


async def _serve() -> None:
    _die_with_parent()
    _come_first()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup: Setup = await receive(reader)
    clock, meter = StampClock(), Meter()
    allow_open_files(setup.orders.slots)
    async with open_wire(setup.orders.target, clock, meter, setup.salt) as wire:
        traffic = Traffic(setup.orders, meter, wire.send, _write)
        _write(Ready())
        begun: Command | None = await receive(reader)
        if begun is None:
            return
        cpu_s, start_s = time.process_time(), time.perf_counter()
        load = asyncio.create_task(traffic.run(begun.at_ns))
        orders = asyncio.create_task(_follow(reader, traffic))
        clocks = asyncio.create_task(_synchronise(clock))
        try:
            await asyncio.wait({load, orders}, return_when=asyncio.FIRST_COMPLETED)
            if not orders.done():
                await load  # it cannot end by itself, so it raises
            if (drained := orders.result()) is None:
                return
            wall_s = time.perf_counter() - start_s
            await load
        finally:
            await _ended(load, orders, clocks)
        lags = traffic.lags_s
        lag = float(np.percentile(lags, 99)) if lags else None
        cpu_s = time.process_time() - cpu_s
        _write(Result(traffic.records, drained, cpu_s, wall_s, clock.kernel_reads, clock.bare_reads, lag))


def _die_with_parent() -> None:
    """Have the kernel end this process with the one that conducts it: a loop that is too busy sees no closed pipe."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _come_first() -> None:
    """Ask for a CPU as soon as there is something to do, where the system allows it.

    A server that waits busily on every core, as vLLM's processes do, else lets the client wait for a third of a second:
    then slots stand idle, and the load is not the one that was asked for. What the client needs is little, and it needs
    it anyway.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        with suppress(OSError):
            os.nice(-10)


async def _follow(reader: asyncio.StreamReader, traffic: Traffic) -> bool | None:
    """Do as told until told to finish; return whether the load was drained, or None if the lease is gone."""
    while (command := await receive(reader)) is not None:
        match command.name:
            case "open":
                traffic.open_window(command.at_ns, command.until_ns)
            case "close":
                traffic.close_window(command.at_ns)
            case "finish":
                return await traffic.finish(command.patience_s)
    return None


async def _synchronise(clock: StampClock) -> None:
    """Keep the clock's offset fresh: wall clocks are slewed."""
    while True:
        await asyncio.sleep(1)
        clock.synchronise()


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    waiting: list[Awaitable[Any]] = list(tasks)
    await asyncio.gather(*waiting, return_exceptions=True)


def _write(message: Progress | Result | Ready) -> None:
    data = memoryview(packed(message))
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


if __name__ == "__main__":
    asyncio.run(_serve())  # the standard loop: others read by themselves, and lose the kernel's stamps
