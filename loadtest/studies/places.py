"""The study of places: an engine in a thread of its worker, or in a process of its own, on a CPU.

`python -m loadtest.studies.places packages/dates --out loadtest/results/places-dates`

Two workers have the same package, each behind a gateway, and one of them has work at a time: in
turns they answer closed loops of dates that were not asked before. All share the machine with the
client. Compared is what stands next to each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import click

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.errors import LoadTestError
from loadtest.metrics import RequestRecord
from loadtest.runner import run
from loadtest.studies.heading import write_result
from loadtest.studies.overhead_stages import part
from loadtest.studies.overload import prompts
from loadtest.studies.stand_in import NAME
from loadtest.work.ask import texts

PLACES = {"thread": "worker", "process": "worker-process"}


class Turn(NamedTuple):
    """Measurements of one closed loop."""

    tokens_per_second: float
    first_token: float  # milliseconds, median


@dataclass(frozen=True)
class Places:
    """The turns at so many streams, by place."""

    num_streams: int
    turns: Mapping[str, Sequence[Turn]]

    @property
    def ratio(self) -> float:
        """Tokens a second of the process over those of the thread: the median of the turns."""
        pairs = zip(self.turns["process"], self.turns["thread"], strict=True)
        return statistics.median(
            process.tokens_per_second / thread.tokens_per_second for process, thread in pairs
        )

    @property
    def later(self) -> float:
        """Milliseconds by which the first token of the process is later: likewise."""
        pairs = zip(self.turns["process"], self.turns["thread"], strict=True)
        return statistics.median(
            process.first_token - thread.first_token for process, thread in pairs
        )


def turn_of(records: Sequence[RequestRecord]) -> Turn:
    """Return what the requests of a closed loop show; LoadTestError if one was not answered."""
    if failed := [record for record in records if record.status != "OK" or not record.token_times]:
        raise LoadTestError(f"{len(failed)} of {len(records)} requests had no answer")
    seconds = max(one.finished for one in records) - min(one.sent for one in records)
    return Turn(
        sum(record.output_tokens for record in records) / seconds,
        1e3 * statistics.median(record.token_times[0] - record.sent for record in records),
    )


def measure_places(
    package: Path, counts: Sequence[int], num_requests: int, new_tokens: int, num_turns: int
) -> list[Places]:
    """Measure so many turns at each number of streams, behind one that warms up."""
    seeds = count(1)

    def turn(address: str, streams: int) -> Turn:
        config = LoadConfig(address, NAME, ClosedLoop(streams), num_requests=num_requests)
        return turn_of(run(config, texts(prompts(next(seeds)), max_new_tokens=new_tokens)).records)

    found: list[Places] = []
    with served_in_both(package, max(counts)) as addresses:
        for streams in counts:
            turns: dict[str, list[Turn]] = {place: [] for place in PLACES}
            for number in range(num_turns + 1):
                for place in sorted(PLACES, reverse=number % 2 == 1):
                    turns[place].append(turn(addresses[place], streams))
            later = {place: taken[1:] for place, taken in turns.items()}
            found.append(Places(streams, later))
    return found


@contextmanager
def served_in_both(package: Path, num_slots: int) -> Iterator[dict[str, str]]:
    """Serve a package in both places; give their addresses."""
    with ExitStack() as stack:
        addresses: dict[str, str] = {}
        for place, what in PLACES.items():
            worker = stack.enter_context(part(what, num_slots, str(package.resolve())))
            gateway = stack.enter_context(part("gateway", num_slots, worker.address))
            addresses[place] = gateway.address
        yield addresses


@click.command()
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--streams", default="1,16", show_default=True, metavar="COUNT,...")
@click.option("--requests", type=click.IntRange(1), default=480, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(
    package: Path, streams: str, requests: int, new_tokens: int, turns: int, out: Path
) -> None:
    """Serve PACKAGE by an engine in a thread and one in a process, and write OUT.json."""
    counts = [int(one) for one in streams.split(",")]
    found = measure_places(package, counts, requests, new_tokens, turns)
    content = {
        "units": {"first_token": "milliseconds"},
        "places": [_described(one) for one in found],
    }
    write_result("loadtest.studies.places", content, out)
    for one in found:
        click.echo(
            f"{one.num_streams} streams: in a process {one.ratio:.3f} of the tokens a second that "
            f"a thread gives, the first token {one.later:.1f} ms later (medians)"
        )


def _described(one: Places) -> dict[str, object]:
    turns = {place: [turn._asdict() for turn in taken] for place, taken in one.turns.items()}
    return {**asdict(one), "turns": turns, "ratio": one.ratio, "later": one.later}


if __name__ == "__main__":
    main()
