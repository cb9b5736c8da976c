"""The study of loading: seconds and memory until an engine is ready, in a fresh process each time.

`python -m loadtest.studies.loading packages/gpt2 --out loadtest/results/loading-gpt2`
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from engine.machine import machine_name
from engine.package import Package, load_package
from loadtest.report import write_document

# Everything that a worker does before it serves: imports, hashes, sessions.
_PROGRAM = """
import json, sys, time
started = time.perf_counter()
from engine.benchmark import read_memory
from engine.config import EngineConfig
from engine.factory import load_engine
from engine.package import load_package
engine = load_engine(load_package(sys.argv[1]), EngineConfig())
seconds, memory = time.perf_counter() - started, read_memory()
print(json.dumps({"seconds": seconds, "peak": memory.peak, "steady": memory.resident,
                  "mapped": memory.mapped}))
"""


@dataclass(frozen=True)
class Loading:
    """One load of a package."""

    seconds: float  # from the start of the program, its imports included
    peak: int  # bytes of resident memory; pages of mapped files count too
    steady: int
    mapped: int  # of the steady, pages of files


def load_once(package: Path) -> Loading:
    """Load a package in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(package)], capture_output=True, text=True, check=True
    )
    return Loading(**json.loads(done.stdout))


def weight_bytes(package: Package) -> int:
    """Return the size of the files of weights."""
    files = package.manifest.files
    return sum(entry.size for name, entry in files.items() if name.endswith(".data"))


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(package: Path, rounds: int, out: Path) -> None:
    """Load PACKAGE again and again, and write OUT.json."""
    weights = weight_bytes(load_package(package))
    loads = [load_once(package) for _ in range(rounds)]
    peak, steady = max(load.peak for load in loads), max(load.steady for load in loads)
    own = max(load.steady - load.mapped for load in loads)
    content = {
        "command": shlex.join(["python", "-m", "loadtest.studies.loading", *sys.argv[1:]]),
        "weight_bytes": weights,
        "peak_to_weights": peak / weights,
        "steady_to_weights": steady / weights,
        "steady_without_mapped_to_weights": own / weights,
        "machine": machine_name(),
        "median_seconds": statistics.median(load.seconds for load in loads),
        "loads": [asdict(load) for load in loads],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_document(content, out.with_suffix(".json"))
    click.echo(
        f"ready in {content['median_seconds']:.2f} s; weights {weights / 1e6:.0f} MB, "
        f"peak {peak / weights:.2f} times them, steady {steady / weights:.2f} times, "
        f"{own / weights:.2f} without pages of files"
    )


if __name__ == "__main__":
    main()
