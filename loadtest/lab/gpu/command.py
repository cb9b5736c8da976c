"""The command: `python -m loadtest.lab gpu --out DIR --budget SECONDS`."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from engine.distributions import check_cuda_distribution
from engine.errors import ConfigError
from loadtest.lab.gpu.part import BAD, Part, Result, Settings, is_emulated
from loadtest.lab.gpu.parts import choose
from loadtest.lab.gpu.running import run_parts
from loadtest.lab.result import heading
from loadtest.result_file import write_atomically, write_document
from server.cli.options import read_numbers

_COMMIT = Path(__file__).parents[3] / ".carry" / "commit"  # stands in for a missing history
_WATCHED = "memory.used,utilization.gpu,clocks.sm,power.draw,temperature.gpu"
_EMULATED = "The device is emulated: nothing is computed, and no number means anything."


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Results come here.")
@click.option("--only", metavar="NAME,...", help="These parts, in this order.  [default: all]")
@click.option(
    "--budget",
    type=click.FloatRange(0, min_open=True),
    default=480.0,
    show_default=True,
    help="Seconds for all parts; none is begun that would take longer.",
)
@click.option("--prepare", is_flag=True, help="Make packages on spare cores meanwhile.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds.")
@click.option(
    "--concurrency",
    default="1,32,256",
    show_default=True,
    callback=read_numbers,
    help="Streams at once.",
)
@click.option("--quick", is_flag=True, help="Tiny models: tries the check itself.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--slower",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="Factor of all estimates and limits, which are those of a GPU beside 16 cores.",
)
@click.option("--work", type=click.Path(path_type=Path), help="Models are kept here.  [nowhere]")
def main(
    out: Path,
    only: str | None,
    budget: float,
    prepare: bool,
    rounds: int,
    concurrency: tuple[int, ...],
    quick: bool,
    device: str,
    slower: float,
    work: Path | None,
) -> None:
    """Show that answers are right on a GPU, then how fast they come.

    The exit code is 1 if a part failed, crashed or was ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the part in progress would go on
    try:
        chosen = choose(only.split(",") if only else (), slower=slower, concurrencies=concurrency)
        if device == "cuda":
            check_cuda_distribution()
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, ConfigError, OSError) as error:
        raise click.UsageError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch, _watched(out / "gpu.csv"):
        place = (work or Path(scratch)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        settings = Settings(place, device, quick, rounds, concurrency)  # type: ignore[arg-type]
        results: list[Result] = []
        _write(out, settings, results)
        for one in run_parts(chosen, settings, out, budget, prepare=prepare):
            if isinstance(one, Part):
                print(f"{one.name} (about {one.seconds:.0f} s) ...", flush=True)
                continue
            results.append(one)
            _write(out, settings, results)
            print(_line(one), flush=True)
    if is_emulated():
        print(_EMULATED)
    if left := [one.name for one in results if one.status == "not run"]:
        print(f"for another call: --only {','.join(left)}")
    sys.exit(int(any(one.status in BAD for one in results)))


def _line(result: Result) -> str:
    return (
        f"{result.name}: {result.status} in {result.seconds:.0f} s "
        f"({result.estimated:.0f} estimated): {result.summary}"
    )


def _write(out: Path, settings: Settings, results: Sequence[Result]) -> None:
    """Write all that is known, each file all or nothing."""
    head = heading()
    if str(head["commit"]).startswith("unknown") and _COMMIT.is_file():
        head["commit"] = f"{_COMMIT.read_text().strip()} (as carried)"
    content = {
        **head,
        "settings": {**asdict(settings), "work": str(settings.work)},
        "is_emulated": is_emulated(),
        "parts": [asdict(result) for result in results],
    }
    write_document(content, out / "results.json")
    lines = [*([_EMULATED] if is_emulated() else []), *map(_line, results)]
    write_atomically(out / "table.txt", ("\n".join(lines) + "\n").encode())


@contextmanager
def _watched(path: Path) -> Iterator[None]:
    """Write what the GPU is doing twice a second, if there is what says it."""
    command = ["nvidia-smi", f"--query-gpu=timestamp,{_WATCHED}", "--format=csv", "-lms", "500"]
    try:
        with path.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    except OSError:
        path.unlink(missing_ok=True)
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        process.wait()
