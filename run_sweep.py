"""Run vllm-sweep from a checkout: the same program as the console script."""

import sys

from sweep.cli import main

if __name__ == "__main__":
    sys.exit(main())
