"""The command: `python -m loadtest.gpu_check --out DIR`."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from engine.distributions import check_cuda_distribution
from engine.errors import ConfigError
from engine.machine import machine_name
from loadtest.gpu_check.catalogue import choose_parts, make_parts
from loadtest.gpu_check.part import Part, Result, Settings, is_emulated
from loadtest.gpu_check.requirements import REQUIREMENTS
from loadtest.gpu_check.results import (
    JSON_NAME,
    TABLE_NAME,
    WIDTH,
    Origin,
    print_tables,
    write,
)
from loadtest.gpu_check.running import run_parts
from loadtest.origin import code_commit, now


def main(arguments: Sequence[str]) -> int:
    """Run the parts that were asked for; return 1 if one was wrong or broke, else 0."""
    options = _parser().parse_args(arguments)
    if options.requirements:
        print("\n".join(REQUIREMENTS))
        return 0
    if options.out is None:
        _parser().error("--out DIR is needed: where results are written")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        work = options.work or Path(scratch)
        settings = Settings(options.device, options.quick, work.absolute())
        only = options.only.split(",") if options.only else ()
        try:
            parts = choose_parts(make_parts(settings), only)
            if options.limit is not None:
                parts = [part.within(part.seconds, options.limit) for part in parts]
            if settings.device == "cuda" and any(part.name != "packages" for part in parts):
                check_cuda_distribution()
            for directory in (options.out, settings.work):
                directory.mkdir(parents=True, exist_ok=True)
        except (ValueError, ConfigError, OSError) as error:
            _parser().error(str(error))
        return _run(parts, settings, options.out, options.budget, list(arguments))


def _run(
    parts: Sequence[Part],
    settings: Settings,
    out: Path,
    budget: float | None,
    arguments: Sequence[str],
) -> int:
    origin = Origin(
        command=shlex.join(["python", "-m", "loadtest.gpu_check", *arguments]),
        commit=code_commit(),
        started_at=now(),
        machine=machine_name(),
        settings={**asdict(settings), "work": str(settings.work)},
        is_emulated=is_emulated(),
    )
    results: list[Result] = []
    write(origin, results, out)
    for result in run_parts(parts, settings, out, budget, _tell_begun):
        results.append(result)
        write(origin, results, out)
        _tell(result)
    print_tables(origin, results, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(f"written: {out / JSON_NAME}, {out / TABLE_NAME}")
    return int(any(result.is_bad for result in results))


def _tell_begun(part: Part) -> None:
    print(f"{part.name} (about {part.seconds:.0f} s) ...", flush=True)


def _tell(result: Result) -> None:
    print(f"{result.name}: {result.status} in {result.seconds:.1f} s: {result.summary}", flush=True)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu_check",
        description="Show that answers are right on a GPU, then how fast they come.",
    )
    parser.add_argument("--out", type=Path, help="directory of results")
    parser.add_argument("--only", metavar="NAMES", help="parts whose name holds one of these, a,b")
    parser.add_argument("--quick", action="store_true", help="small models and few turns")
    parser.add_argument("--budget", type=_seconds, metavar="SECONDS", help="for all parts together")
    parser.add_argument(
        "--limit",
        type=_seconds,
        metavar="SECONDS",
        help="end a part after so many  [default: of each its own, for a GPU]",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="[default: %(default)s]"
    )
    parser.add_argument("--work", type=Path, help="where models are kept  [default: nowhere]")
    parser.add_argument(
        "--requirements", action="store_true", help="print what has to be installed, and end"
    )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the part in progress would go on
    sys.exit(main(sys.argv[1:]))
