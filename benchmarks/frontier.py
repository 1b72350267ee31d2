"""Launches that end out of memory: a search with and without what the sweep knows of memory, on a made-up GPU.

`python benchmarks/frontier.py --sampler tpe --seeds 20`. The GPU is tests/run/frontier.py's: its start-up logs are
read by the same rules as a real one's. Beside the launches it tells how many configurations were skipped although they
would have run, and the best speed that was found.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.run.frontier import Study, study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", choices=("tpe", "gp", "random"), default="tpe")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    out = sys.stdout
    out.write(
        "| memory.skip | out of memory, median (range) of 40 | skipped | skipped wrongly | best, median tok/s |\n"
    )
    out.write("| --- | --- | --- | --- | --- |\n")
    for skip in (False, True):
        studies = [_study(args.sampler, seed, skip=skip) for seed in range(args.seeds)]
        failed = [made.out_of_memory for made in studies]
        out.write(
            f"| {str(skip).lower()} | {statistics.median(failed):g} ({min(failed)}-{max(failed)}) "
            f"| {sum(len(made.skipped) for made in studies) / len(studies):.1f} "
            f"| {sum(len(made.skipped_wrongly) for made in studies) / len(studies):.2f} "
            f"| {statistics.median(made.best for made in studies):,.0f} |\n"
        )
        out.flush()


def _study(sampler: str, seed: int, *, skip: bool) -> Study:
    with tempfile.TemporaryDirectory() as folder:
        return study(Path(folder), sampler, seed, skip=skip)


if __name__ == "__main__":
    main()
