"""The arguments of `bench`, apart from what it needs to run: they are read even where only help is wanted."""

from __future__ import annotations

import argparse


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the endpoint, the load and the limits. What was not given is None: a search space may say it instead."""
    parser.add_argument(
        "--base-url", action="append", required=True, metavar="URL", help="endpoint; given twice, they are compared"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="as /v1/models spells it")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument(
        "--space", metavar="FILE", help="take load, limits, warm-up and seed from a search space; all its levels run"
    )
    parser.add_argument("--endpoint", choices=("completions", "chat"), help="(default: completions)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="requests kept in flight (default: 16)")
    load.add_argument("--rate", type=float, metavar="R", help="arrivals, requests a second")
    parser.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), help="with --rate (default: poisson)")
    parser.add_argument("--burstiness", type=float, metavar="B", help="with gamma: its shape; below 1 comes in bursts")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, metavar="K", help="count this many requests")
    length.add_argument("--seconds", type=float, metavar="S", help="count for so long (default: 60)")
    parser.add_argument("--input-tokens", type=int, metavar="I", help="(default: 512)")
    parser.add_argument("--output-tokens", type=int, metavar="O", help="(default: 128)")
    parser.add_argument("--shared-prefix", type=int, metavar="P", help="tokens that prompts of a group begin with")
    parser.add_argument("--prefix-groups", type=int, metavar="G", help="with --shared-prefix (default: 1)")
    parser.add_argument("--processes", type=int, metavar="N", help="of the load client (default: as needed)")
    parser.add_argument(
        "--slo", action="append", nargs="+", default=[], metavar="NAME=LIMIT", help="such as ttft_p99=500ms"
    )
    parser.add_argument("--max-warmup", type=float, metavar="S", help="longest warm-up (default: 120)")
    parser.add_argument("--seed", type=_whole, metavar="N", help="of lengths and arrivals (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
