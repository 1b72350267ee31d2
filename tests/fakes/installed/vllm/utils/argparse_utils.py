import argparse
from pathlib import Path

import yaml


def human_readable_int(value):
    return int(value[:-1]) * 1000 if value.endswith("k") else int(value)


def optional_type(kind):
    def _optional_type(value):
        return None if value == "None" else kind(value)

    return _optional_type


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, args):
        command, option, path = args
        assert option == "--config"
        words = [command]
        for name, value in yaml.safe_load(Path(path).read_text(encoding="utf-8")).items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return super().parse_args(words)
