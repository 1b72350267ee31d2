"""`python -m tests.refserver`: prints `listening PORT` when it is ready, and ends on SIGTERM."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from tests.refserver.server import Options, Server
from tests.refserver.timing import Timing


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
        with suppress(PermissionError):  # whatever else runs on that core then has to wait
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server(_options(args))
    port = server.listen(args.port)
    gc.freeze()
    gc.disable()  # its pauses would be lateness; nothing here makes cycles
    print(f"listening {port}", flush=True)
    server.reactor.run()


def _leave(_number: int, _frame: Any) -> None:
    sys.exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refserver")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--core", type=int, help="the only core to run on")
    parser.add_argument("--model", default="m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.05, metavar="S")
    parser.add_argument("--ttft-sigma", type=float, default=0.0)
    parser.add_argument("--itl", type=float, default=0.02, metavar="S")
    parser.add_argument("--itl-sigma", type=float, default=0.0)
    parser.add_argument("--stall-frac", type=float, default=0.0, help="share of the gaps that have a stall")
    parser.add_argument("--stall", type=float, default=0.0, metavar="S")
    parser.add_argument("--mode", choices=("spread", "burst"), default="spread")
    parser.add_argument("--step", type=float, default=0.0, metavar="S", help="of a burst (default: the ITL)")
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--natural-ends", action="store_true", help="answers are shorter, unless ignore_eos")
    parser.add_argument("--scenario", default="normal", help="NAME or NAME:TOKENS, for requests that name none")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="play it to every N-th request")
    parser.add_argument("--keep-alive", type=float, default=5.0, metavar="S")
    parser.add_argument("--freeze", metavar="AT,LENGTH", help="write nothing for a time, after the first request")
    return parser.parse_args()


def _options(args: argparse.Namespace) -> Options:
    freeze = None
    if args.freeze:
        after_s, length_s = map(float, args.freeze.split(","))
        freeze = (after_s, length_s)
    return Options(
        timing=Timing(
            seed=args.seed,
            ttft_s=args.ttft,
            ttft_sigma=args.ttft_sigma,
            itl_s=args.itl,
            itl_sigma=args.itl_sigma,
            stall_frac=args.stall_frac,
            stall_s=args.stall,
            mode=args.mode,
            step_s=args.step,
        ),
        model=args.model,
        scenario=args.scenario,
        every=args.every,
        tokens_per_chunk=args.tokens_per_chunk,
        natural_ends=args.natural_ends,
        keep_alive_s=args.keep_alive,
        freeze=freeze,
    )


if __name__ == "__main__":
    main()
