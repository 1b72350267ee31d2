"""The arguments of `bench`, apart from what it needs to run: they are read even where only help is wanted."""

from __future__ import annotations

import argparse


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the endpoint, the load and the limits."""
    parser.add_argument(
        "--base-url", action="append", required=True, metavar="URL", help="endpoint; given twice, they are compared"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="as /v1/models spells it")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="(default: %(default)s)"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="requests kept in flight (default: 16)")
    load.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests a second")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, metavar="K", help="count this many requests")
    length.add_argument("--seconds", type=float, metavar="S", help="count for so long (default: 60)")
    parser.add_argument("--input-tokens", type=int, default=512, metavar="I", help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="O", help="(default: %(default)s)")
    parser.add_argument(
        "--slo", action="append", nargs="+", default=[], metavar="NAME=LIMIT", help="such as ttft_p99=500ms"
    )
    parser.add_argument(
        "--max-warmup", type=float, default=120, metavar="S", help="longest warm-up (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_whole, default=0, metavar="N", help="of the arrivals (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
