"""`python -m loadtest.lab chaos packages/dates --minutes 30`: harm to a server under load.

It starts `tokenweir serve`, learns the right answers, keeps streams going, and does one harm after
the other: kills workers (SIGKILL), stops them (SIGSTOP), ends them (SIGTERM), kills Ray Serve's
controller, and the command itself, which is the gateway, and lets either stand still for six
seconds. The next comes when all workers serve again, or `--serving` of them. It exits with 1 if
an answer was wrong, a token missing or doubled, if a stream hung, or none was right, and if the
server has not come back behind a harm, which ends the run. Then what the server said is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tokenweir import AsyncClient

from loadtest.errors import LoadTestError
from loadtest.lab.chaos.harm import KINDS, STOP_WORKER, Harmed, harm
from loadtest.lab.chaos.load import Load, cases
from loadtest.lab.chaos.report import failures, summary, table
from loadtest.lab.chaos.server import Server
from loadtest.lab.result import write_result

_PROMPTS = ("3rd of Feb, 1998", "le 7 juillet 2004", "12.03.2021", "one two three")
_PAUSE = 0.3  # seconds between recovery and the next harm, so that it meets streams anywhere
_GONE_ON = "goes on at another"  # the gateway's words about a stream


@dataclass(frozen=True)
class Plan:
    """The harms to do, and how often."""

    kinds: tuple[str, ...]  # one after the other
    minutes: float
    most: int  # harms
    concurrency: int
    num_serving: int  # workers, before the next one
    num_tokens: int  # in an answer, at most


@dataclass(frozen=True)
class Outcome:
    """The harms that were done, and their results."""

    load: Load
    harmed: list[Harmed]
    broken_off: str = ""  # why the run has ended before its time

    @property
    def is_good(self) -> bool:
        """Whether the server came back each time, and all answers were right or said why not."""
        return self.load.tally.is_good and not self.broken_off


async def do_harm(server: Server, load: Load, plan: Plan, pause: float = _PAUSE) -> Outcome:
    """Do harm under load until it is time, or so often, or the server does not come back."""
    found: list[tuple[str, float, float]] = []  # kind, when, recovery
    broken_off = ""
    ends = time.monotonic() + 60 * plan.minutes
    async with load.going_on(plan.concurrency):
        for kind in itertools.islice(itertools.cycle(plan.kinds), plan.most):
            if time.monotonic() > ends:
                break
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                gone = await asyncio.to_thread(harm, kind, server)
                whole = await asyncio.to_thread(server.wait_until_whole, gone, plan.num_serving)
            except LoadTestError as error:
                broken_off = f"behind {kind}: {error}"
                break
            found.append((kind, began, whole - began))
            click.echo(f"{len(found)} {kind}: {found[-1][2]:.1f} s", err=True)
    return Outcome(load, _harmed(found, load), broken_off)


def _harmed(found: Sequence[tuple[str, float, float]], load: Load) -> list[Harmed]:
    """Return every harm with what was felt of it, until the next one."""
    nexts = (*(began for _, began, _ in found[1:]), math.inf)
    return [
        Harmed(kind, took, load.first_answer_after(began), load.failures_between(began, following))
        for (kind, began, took), following in zip(found, nexts, strict=True)
    ]


async def learn_and_harm(server: Server, plan: Plan) -> Outcome:
    """Learn the right answers, then do harm."""
    async with AsyncClient(server.address, max_attempts=5) as client:
        (model,) = await client.models()
        known = await cases(client, model.model, _PROMPTS, plan.num_tokens)
        return await do_harm(server, Load(client, model.model, known), plan)


def run(server: Server, plan: Plan) -> Outcome:
    """Start a server, do harm to it, and stop it; LoadTestError if it does not start."""
    server.start()
    try:
        server.wait_until_whole()
        return asyncio.run(learn_and_harm(server, plan))
    finally:
        server.stop()


@click.command(help=__doc__)
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--minutes", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--harms", type=click.IntRange(min=1), help="No more than so many.")
@click.option("--only", "kinds", type=click.Choice(KINDS), multiple=True, help="Kinds of harm.")
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--serving", type=click.IntRange(min=1), help="Workers that serve before the next.")
@click.option("--concurrency", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=200, help="Tokens of an answer, at most."
)
@click.option("--out", type=click.Path(path_type=Path), help="Without an ending.")
def main(
    package: Path,
    minutes: float,
    harms: int | None,
    kinds: tuple[str, ...],
    replicas: int,
    serving: int | None,
    concurrency: int,
    tokens: int,
    out: Path | None,
) -> None:
    """Run, print a table, and write OUT.json."""
    most = harms or sys.maxsize
    plan = Plan(kinds or KINDS, minutes, most, concurrency, serving or replicas, tokens)
    if STOP_WORKER in plan.kinds and plan.num_serving < replicas:
        raise click.UsageError(
            f"{STOP_WORKER} may meet a worker that starts, for which Ray waits for ever; leave out "
            "--serving, or name other kinds with --only"
        )
    log = Path(tempfile.mkdtemp(prefix="chaos-")) / "serve.log"
    server = Server(package, replicas, log)
    try:
        outcome = run(server, plan)
    except KeyboardInterrupt:
        shutil.rmtree(log.parent)
        raise
    num_gone_on = server.num_said(_GONE_ON)
    click.echo(table(outcome.harmed, outcome.load.tally, num_gone_on))
    if out is not None:
        write(out, plan, outcome, num_gone_on)
    if not outcome.is_good:
        click.echo(outcome.broken_off or f"not all was well; see {log}", err=True)
        sys.exit(1)
    shutil.rmtree(log.parent)


def write(out: Path, plan: Plan, outcome: Outcome, num_gone_on: int) -> None:
    """Write what was found to OUT.json."""
    content = {
        "plan": asdict(plan),
        "broken_off": outcome.broken_off,
        "harms": summary(outcome.harmed),
        "streams": vars(outcome.load.tally),  # asdict makes pairs of what a Counter has
        "streams_gone_on_at_another_worker": num_gone_on,
        "failures": failures(outcome.harmed),
        "wrong": outcome.load.wrong,
    }
    write_result(content, out)
