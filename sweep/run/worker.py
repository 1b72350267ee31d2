"""The worker: one process that owns one launch of a server, from its start to its last process's end.

It reads one job (a line of JSON) from stdin and writes lines of JSON to stdout: {"say": …} while it works, and at the
end {"measured": …}. Stdin is its lease: when that closes, whoever started it is gone, and it ends its server and
leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from typing import Any

from pydantic import TypeAdapter

from sweep.errors import SweepError
from sweep.failure import Failure
from sweep.model import Job, Measured
from sweep.run.trial import run_trial
from sweep.serve.process import become_subreaper

LEASE_LOST = 75  # EX_TEMPFAIL: the coordinator went away in the middle of the trial


def main() -> int:
    # Ctrl-C is for the coordinator, which then closes our stdin; a hang-up of its terminal reaches us the same way.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    return asyncio.run(_work())


async def _work() -> int:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    line = await stdin.readline()
    if not line.strip():
        return LEASE_LOST
    job = TypeAdapter(Job).validate_json(line)
    trial = asyncio.create_task(_guarded(job))
    lease = asyncio.create_task(stdin.read())
    loop.add_signal_handler(signal.SIGTERM, trial.cancel)
    await asyncio.wait({trial, lease}, return_when=asyncio.FIRST_COMPLETED)
    if not trial.done():
        trial.cancel()
    try:
        measured = await trial
    except asyncio.CancelledError:
        return LEASE_LOST
    _write({"measured": TypeAdapter(Measured).dump_python(measured, mode="json")})
    # The lease is watched to the end of the trial only; a pending read would keep the loop's pipe open.
    lease.cancel()
    return 0


async def _guarded(job: Job) -> Measured:
    """Run the trial; a bug in it ends this trial with its traceback in worker.log, not the night."""
    try:
        return await run_trial(job, say=lambda text: _write({"say": text}))
    except SweepError as error:
        # No program to start, too few open files: the next trial would meet the same.
        return Measured("failed", failure=Failure("other", "abort_sweep", str(error), "Mend that, and start again."))
    except Exception as error:  # noqa: BLE001 - the outer frame of the worker
        traceback.print_exc()
        failure = Failure(
            kind="other",
            treatment="fail_trial",
            evidence=f"{type(error).__name__}: {error}",
            advice="An error inside the sweep itself; the traceback is in this trial's worker.log.",
            phase="load",
        )
        return Measured("failed", failure=failure)


def _write(message: dict[str, Any]) -> None:
    data = json.dumps(message, allow_nan=False).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass  # nobody listens any more; the lease on stdin says so too


if __name__ == "__main__":
    sys.exit(main())
