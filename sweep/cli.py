"""The command line. Results go to stdout, everything else to stderr; errors become exit codes here and nowhere else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep import __version__
from sweep.errors import ConfigError, MachineError, SweepError

if TYPE_CHECKING:
    from sweep.config import SweepConfig
    from sweep.report.view import StudyView


_STOPPING = "Stopping: the server is being ended, which may take the better part of a minute. Finished trials are kept."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
    except SweepError as error:
        _say(f"error: {error}")
        if getattr(args, "json", False):
            _print_json({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our stdout went away; there is nobody left to tell.
        sys.stderr.close()
        return 1
    except OSError as error:
        # A full disk, a folder that may not be written: what the next trial would meet as well.
        _say(f"error: {error.filename or 'a file of the study'}: {error.strerror or error}")
        return MachineError.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-sweep",
        description="Finds the vLLM flags that serve your model best on this machine.",
        epilog="Begin with `make sweep`, then copy a file of search_spaces/ and put your model in.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-sweep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="run a study, or go on with one")
    run.add_argument(
        "spaces", nargs="+", type=Path, metavar="SPACE.yaml", help="several files are run one after another"
    )
    run.add_argument("--until", metavar="HH:MM", help="start no trial that cannot end by this time of day")
    run.add_argument("--hours", type=float, help="as run.hours: the time for each study")
    run.add_argument("--trials", type=int, help="as run.trials: trials in all, those of an earlier run included")
    _add_common(run)
    run.set_defaults(run=_run)

    check = commands.add_parser("check", help="check a search space and show the plan, without a launch")
    check.add_argument("space", type=Path, metavar="SPACE.yaml")
    check.add_argument("--offline", action="store_true", help="do not start vLLM: go by its flags as read before")
    _add_common(check)
    check.set_defaults(run=_check)

    diagnose = commands.add_parser("diagnose", help="why a vLLM server died, and what to change")
    diagnose.add_argument("log", metavar="LOG", help="the server's log, of any length; - for standard input")
    diagnose.add_argument("--exit-code", type=int, metavar="N", help="of the server; -9 or 137 for a signal")
    diagnose.add_argument("--phase", choices=["start", "load"], help="when it died; without this, as the log says")
    diagnose.add_argument(
        "--fixed", action="append", default=[], metavar="FLAG", help="a flag that is not to be changed; may be repeated"
    )
    diagnose.add_argument("--json", action="store_true", help="print one JSON document")
    diagnose.set_defaults(run=_diagnose)

    doctor = commands.add_parser("doctor", help="what on this machine would stop a sweep, or spoil it")
    doctor.add_argument("space", nargs="?", type=Path, metavar="SPACE.yaml", help="look at what this one needs as well")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")
    doctor.set_defaults(run=_doctor)

    status = commands.add_parser("status", help="how far a study is; works while it runs")
    status.add_argument("study", nargs="?", help="a name below results/, or a folder; without it, all studies")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    status.set_defaults(run=_status)

    report = commands.add_parser("report", help="make a study's tables, best configuration and report again")
    report.add_argument("study", help="a name below results/, or a folder")
    report.add_argument("--json", action="store_true", help="print one JSON document")
    report.set_defaults(run=_report)

    bench = commands.add_parser("bench", help="put the same load on any OpenAI-compatible endpoint")
    _add_bench(bench)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="such as run.name=night2"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from sweep.run.bench_args import add_arguments

    add_arguments(parser)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from sweep.run.bench import run_bench

    return run_bench(args)


def _run(args: argparse.Namespace) -> int:
    from sweep.config import parse_until
    from sweep.run.flag_check import load_space
    from sweep.run.night import run_interruptibly, run_study

    if args.until is not None:
        parse_until(args.until)
    # All files are read before the first one runs: a typing error in the last must not be found in the morning.
    configs = [load_space(path, _overrides(args)) for path in args.spaces]
    _refuse_twins(configs)
    documents: list[dict[str, Any]] = []

    async def night() -> int:
        worst = 0
        for config in configs:
            worst = max(worst, await _study(run_study, config, args, documents, alone=len(configs) == 1))
        return worst

    code = run_interruptibly(night, on_stop=lambda: _say(_STOPPING))
    if code > 128:
        _say("Stopped. The same command goes on where it was.")
    if args.json:
        _print_json(documents if len(configs) > 1 else documents[0] if documents else {"exit_code": code})
    return code


async def _study(
    run_study: Callable[..., Coroutine[Any, Any, tuple[int, StudyView]]],
    config: SweepConfig,
    args: argparse.Namespace,
    documents: list[dict[str, Any]],
    *,
    alone: bool,
) -> int:
    """Run one study of the night. Where others follow, what stops this one is told and does not stop them."""
    from sweep.progress import open_progress
    from sweep.report.summary import closing

    try:
        with open_progress(sys.stderr) as emit:
            code, view = await run_study(config, emit, until=args.until)
    except SweepError as error:
        if alone:
            raise
        _say(f"error: {config.run.name}: {error}")
        return error.exit_code
    documents.append(_document(view))
    if not args.json:
        print(closing(view), flush=True)
    return code


def _overrides(args: argparse.Namespace) -> list[str]:
    overrides = list(args.overrides)
    for key in ("trials", "hours"):
        value = getattr(args, key, None)
        overrides += [f"run.{key}={value}"] if value is not None else []
    return overrides


def _refuse_twins(configs: Sequence[SweepConfig]) -> None:
    names = [config.run.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the files are called {name!r}; give each its own run.name")


def _check(args: argparse.Namespace) -> int:
    from sweep.run.check import check_document, check_text
    from sweep.run.flag_check import load_space

    config = load_space(args.space, _overrides(args))
    document = check_document(config, ask_vllm=not args.offline)
    if args.json:
        _print_json(document)
    else:
        print(check_text(document))
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from sweep.run.diagnose import diagnosis, diagnosis_document, diagnosis_text

    found = diagnosis(args.log, exit_code=args.exit_code, phase=args.phase, fixed=args.fixed)
    if args.json:
        _print_json(diagnosis_document(found))
    else:
        print(diagnosis_text(found))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from sweep.run.doctor import doctor_document, doctor_text

    document = doctor_document(args.space)
    if args.json:
        _print_json(document)
    else:
        print(doctor_text(document))
    return 0 if document["ok"] else MachineError.exit_code


def _status(args: argparse.Namespace) -> int:
    from sweep.run.status import status_document, status_text

    documents = [status_document(root) for root in _roots(args.study)]
    if args.json:
        _print_json(documents if args.study is None else documents[0])
    else:
        print("\n\n".join(map(status_text, documents)) or "No study yet: results/ is empty.")
    return 0


def _report(args: argparse.Namespace) -> int:
    import asyncio

    from sweep.report.summary import closing
    from sweep.run.night import rebuild

    (root,) = _roots(args.study)
    view = asyncio.run(rebuild(root))
    if args.json:
        _print_json(_document(view))
    else:
        print(closing(view))
    return 0


def _roots(study: str | None) -> list[Path]:
    """Return the folders that a study's name or path means; all studies without one."""
    from sweep.run.night import RESULTS

    if study is None:
        return sorted(path.parent for path in RESULTS.glob("*/config.yaml"))
    for folder in (RESULTS / study, Path(study)):
        if (folder / "config.yaml").is_file():
            return [folder]
    known = ", ".join(path.parent.name for path in sorted(RESULTS.glob("*/config.yaml"))) or "none yet"
    raise ConfigError(f"no study {study!r}; there are: {known}")


def _document(view: StudyView) -> dict[str, Any]:
    """Return what `--json` prints of a finished study."""
    shown = view.outcome(view.shown)
    return {
        "study": view.name,
        "folder": view.folder,
        "complete": view.complete,
        "trials": len(view.outcomes),
        "objective": view.objective,
        "unit": view.unit,
        "baseline": {"trial": view.baseline, "value": view.value(view.baseline)},
        "best": None if view.best is None else {"trial": view.best, "value": view.value(view.best)},
        "nearest_miss": None
        if view.nearest_miss is None
        else {"trial": view.nearest_miss, "misses": view.misses(view.nearest_miss)},
        "gain_frac": view.gain_frac(view.shown),
        "flags": shown.flags if shown else None,
        "notes": list(view.notes),
    }


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _say(text: str) -> None:
    from sweep.text import printable

    # Names of models and words of servers may hold escape sequences.
    sys.stderr.write("\n".join(printable(line) for line in text.rstrip().splitlines()) + "\n")
