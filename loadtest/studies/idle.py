"""The study of idleness: what a server costs that nobody asks anything, process by process.

`python -m loadtest.studies.idle packages/dates --out loadtest/results/idle`
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from loadtest.lab.result import write_result
from loadtest.lab.serve import served

_TICKS = os.sysconf("SC_CLK_TCK")  # processor time is counted in so many ticks a second
_WHOLE = """
[http]
port = 0
[metrics]
port = 0
[admin]
port = 0
"""
_NUM_PARTS = 10  # parts of the time, between which memory is read


@dataclass(frozen=True)
class ProcessUse:
    """Resources that one process has used so far."""

    name: str
    processor_seconds: float
    memory: int  # bytes of resident memory that no file backs


@dataclass(frozen=True)
class IdleProcess:
    """One process over the time of the measurement."""

    name: str
    cores: float  # processor time by time
    memory: int  # bytes at the end
    growth: int  # bytes


def compare(
    before: dict[int, ProcessUse], after: dict[int, ProcessUse], seconds: float
) -> list[IdleProcess]:
    """Return what the processes that lived all the time have used, the largest first."""
    found = [
        IdleProcess(
            name=now.name,
            cores=(now.processor_seconds - before[pid].processor_seconds) / seconds,
            memory=now.memory,
            growth=now.memory - before[pid].memory,
        )
        for pid, now in after.items()
        if pid in before
    ]
    return sorted(found, key=lambda process: -process.cores)


def total(processes: list[IdleProcess]) -> IdleProcess:
    """Return the sum of all."""
    return IdleProcess(
        name=f"{len(processes)} processes",
        cores=sum(process.cores for process in processes),
        memory=sum(process.memory for process in processes),
        growth=sum(process.growth for process in processes),
    )


def _memory_of(pid: int, seen: list[dict[int, ProcessUse]]) -> list[int]:
    return [uses[pid].memory for uses in seen if pid in uses]


def read_tree(root: int) -> dict[int, ProcessUse]:
    """Return what a process and all below it have used, by process id."""
    parents = {pid: _parent(pid) for pid in _process_ids()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    uses = {}
    for pid in found:
        with contextlib.suppress(OSError):  # it has just ended
            uses[pid] = _read_use(pid)
    return uses


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _read_use(pid: int) -> ProcessUse:
    stat = _stat(pid)
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return ProcessUse(
        name=_name(Path(f"/proc/{pid}/cmdline").read_bytes()),
        processor_seconds=(int(stat[11]) + int(stat[12])) / _TICKS,
        memory=int(status["RssAnon"].split()[0]) * 1024 if "RssAnon" in status else 0,
    )


def _name(command_line: bytes) -> str:
    """Return what a person calls the process: its title or program, or the script it runs."""
    words = command_line.decode(errors="replace").split("\0")
    if not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name if words[0].startswith("/") else words[0]
    if words[1:2] == ["-c"] and "serve" in words:
        return "tokenweir serve"
    scripts = [word for word in words[1:] if word and not word.startswith("-")]
    return Path(scripts[0]).name if scripts else words[0]


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--settle", type=float, default=30, show_default=True, help="Seconds before.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60, show_default=True)
@click.option("--whole", is_flag=True, help="With metrics, admin port and HTTP server, too.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path, replicas: int, settle: float, seconds: float, whole: bool, out: Path
) -> None:
    """Serve PACKAGE, ask nothing, and write OUT.json."""
    with served(package, _WHOLE if whole else "", replicas) as server:
        time.sleep(settle)
        started, seen = time.monotonic(), [read_tree(server.pid)]
        for _ in range(_NUM_PARTS):
            time.sleep(seconds / _NUM_PARTS)
            seen.append(read_tree(server.pid))
        elapsed = time.monotonic() - started
    processes = compare(seen[0], seen[-1], elapsed)
    content = {
        "seconds": elapsed,
        "total": asdict(total(processes)),
        "processes": [asdict(process) for process in processes],
        # Growth up to some level is no leak.
        "memory_over_time": {
            f"{use.name} {pid}": _memory_of(pid, seen) for pid, use in seen[0].items()
        },
    }
    write_result(content, out)
    for process in [*processes, total(processes)]:
        click.echo(
            f"{process.cores:7.4f} cores {process.memory / 1e6:7.1f} MB "
            f"{process.growth / 1e3:+8.0f} kB  {process.name}"
        )


if __name__ == "__main__":
    main()
