import argparse
import json

from vllm.utils.argparse_utils import human_readable_int, optional_type


class Serve:
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        add = parser.add_argument
        add("model_tag", nargs="?")
        add("--config")
        add("--model")
        add("--uvicorn-log-level", choices=["info", "error"], default="info")
        add("--max-num-seqs", type=optional_type(int))
        add("--max-num-batched-tokens", type=human_readable_int)
        add("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
        add("--block-size", type=int)
        add("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
        add("--gpu-memory-utilization", "--device-memory-utilization", type=float, default=0.9)
        add("--tensor-parallel-size", "-tp", type=int, default=1)
        add("--compilation-config", "-cc", type=json.loads, default={})
        add("--cudagraph-capture-sizes", type=int, nargs="+")
        add("--disable-log-stats", action="store_true")
        add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
        add("--quantization", type=optional_type(str))
        add("--enforce-eager", action=argparse.BooleanOptionalAction)
        add("--headless", action="store_true")


def cmd_init():
    return [Serve()]
