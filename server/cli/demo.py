"""The command that shows all of it on one machine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.config import Device
from exporter.openmp import configure_openmp
from server.cli.app import cli
from server.cli.exit_codes import NOT_USABLE, CommandError
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.models.checkpoints import print_report
from server.cli.models.packages import export_with_progress
from server.cli.options import any_path, examples
from server.cli.progress import show_progress
from server.cli.serving.service import announce, serve_until_ended, verify_apart
from server.cli.typed_dates import TYPED_DATES
from server.process import prepare_to_relay
from server.settings import Admin, Engine, Listen, Packages, Settings
from server.signals import cancelled_by_signals

if TYPE_CHECKING:
    from engine.package.manifest import Precision

MODEL = "dates"
NUM_REPLICAS = 2
NUM_WRONG_ALLOWED = 1  # typed dates; a model that is 99 % right errs now and then
_PORT = 50051  # for --keep-serving
LAST = "loadtest.json"  # written at the end of a demo
LOAD_REQUESTS, LOAD_CONCURRENCY = 400, 16


@click.command(
    epilog=examples(
        "tokenweir demo",
        "tokenweir demo --keep-serving",
        "tokenweir demo --device cuda --precision bf16",
    ),
)
@click.option(
    "--out", type=any_path, default=Path("demo"), show_default=True, help="Directory of all files."
)
@click.option(
    "--keep-serving",
    is_flag=True,
    help="Serve on port 50051 until Ctrl-C; train and export only what is not there yet.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device for the model; with cuda two workers share a GPU.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Type of numbers.  [default: fp32; with --device cuda fp16]",
)
@needs("serve", "cpu", "export", "loadtest")
def demo(out: Path, keep_serving: bool, device: Device, precision: Precision | None) -> int:
    """Train a model on dates, export it and prove the export equal, serve it with two workers, ask
    it a dozen dates, load-test it, stop everything. Takes a few minutes on two cores.

    If it was stopped, the next one continues the training; after a complete one it starts again
    from the beginning. Exits with 0 only if every step succeeded.
    """
    precision = precision or ("fp16" if device == "cuda" else "fp32")
    if device == "cpu" and precision != "fp32":
        raise click.UsageError(f"--precision {precision} is for --device cuda")
    package = out / "package"
    prepare_to_relay()  # before anything imports gRPC
    if keep_serving:
        from server.listening import check_ports_are_free

        check_ports_are_free((f"`tokenweir serve {package} --port`", "127.0.0.1", _PORT))
    if not (keep_serving and package.is_dir()):
        _make_package(out, package, device, precision)
    if keep_serving:
        serve_until_ended(_settings(package, device, port=_PORT))
        return 0

    with cleaned_up():
        return asyncio.run(_show(package, out, device))


def _make_package(out: Path, package: Path, device: Device, precision: Precision) -> None:
    if device == "cuda":
        from engine.cuda.device import open_device

        open_device()  # fails before the training if something is missing

    configure_openmp()  # before torch is loaded
    from exporter.tasks import build_task
    from exporter.training.trainer import train

    checkpoint = out / "checkpoint"
    goes_on = _is_interrupted(checkpoint, out / LAST)
    (out / LAST).unlink(missing_ok=True)
    _headline("Train")
    with cleaned_up(), show_progress(f"Training {MODEL}") as progress:
        build = partial(build_task, MODEL)
        try:
            report = train(build, checkpoint, resume=goes_on, progress=progress, say=click.echo)
        except KeyboardInterrupt:
            click.echo("The demo needs no --resume: asked again, it goes on from there.", err=True)
            raise
    print_report(report)
    if not report.target_reached:
        raise click.ClickException(f"the model is not good enough: {report.summary}")
    _headline("Export")
    export_with_progress(checkpoint, package, name=MODEL, target=device, precision=precision)
    if device == "cuda":
        _headline("Verify on the GPU")
        engine = _settings(package, device, port=0).for_targets([device]).engine_config
        with cleaned_up():
            verify_apart(package, checkpoint, device, engine)


def _is_interrupted(checkpoint: Path, last: Path) -> bool:
    """Return whether an earlier demo did not come to its last file, and left a run to go on with.

    Another task's is not touched.
    """
    from exporter.training.state import STATE_NAME, read_state

    if not (checkpoint / STATE_NAME).is_file():
        return False
    state = read_state(checkpoint)
    if state.task != MODEL:
        raise CommandError(
            f"{checkpoint} holds a run of {state.task}, which is not this demo's; "
            "give another directory with --out",
            NOT_USABLE,
        )
    return not (state.finished and last.is_file())


async def _show(package: Path, out: Path, device: Device) -> int:
    """Serve the package and use it as a client would; return the exit code."""
    from server.ray.serving import serving

    _headline("Serve")
    config = _settings(package, device, port=0)
    with cancelled_by_signals() as signals:
        async with serving(config) as service:
            for worker in service.discovery.workers:
                click.echo(str(worker))
            announce(service, [MODEL], config.log)
            # As a client would, and not on the loop that the gateway runs on.
            problems = await asyncio.to_thread(_use, service.address, out, service.admin_address)
    if signals:
        return 128 + signals[0]
    click.echo("stopped")
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    return 1 if problems else 0


def _use(address: str, out: Path, admin_address: str | None = None) -> list[str]:
    """Ask the server the dates, load-test it; return what went wrong."""
    _headline("Ask")
    problems = _ask(address)
    _headline("Load test")
    pages = {"--json": out / LAST, "--html": out / "loadtest.html", "--png": out / "loadtest.png"}
    place = {"--server": address, **({"--admin": admin_address} if admin_address else {})}
    load = {"--model": MODEL, "--concurrency": LOAD_CONCURRENCY, "--requests": LOAD_REQUESTS}
    words = [str(word) for pair in {**load, **place, **pages}.items() for word in pair]
    code = cli.main(["loadtest", *words], "tokenweir", standalone_mode=False)
    return [*problems, *(["the load test has failed"] if code else [])]


def _ask(address: str) -> list[str]:
    # Not above: gRPC is prepared before it is imported.
    from tokenweir import Client

    from server.cli.calls.generation import print_stream

    wrong = []
    with Client(address) as client:
        for typed, meant in TYPED_DATES.items():
            click.echo(f"{typed:>26} -> ", nl=False)
            answer = print_stream(client, MODEL, typed, {}).text
            if answer != meant:
                wrong.append(f"{typed!r} is {meant}, not {answer!r}")
    click.echo(f"{len(TYPED_DATES) - len(wrong)} of {len(TYPED_DATES)} right")
    return wrong if len(wrong) > NUM_WRONG_ALLOWED else []


def _settings(package: Path, device: Device, port: int) -> Settings:
    return Settings(
        listen=Listen(port=port),
        admin=Admin(port=None if port else 0),  # the load test asks how busy it is
        packages=Packages(models={MODEL: package.resolve()}),
        engine=Engine(
            device=device,
            min_replicas=NUM_REPLICAS,
            max_replicas=NUM_REPLICAS,
            num_gpus_per_replica=1 / NUM_REPLICAS if device == "cuda" else None,
        ),
    )


def _headline(text: str) -> None:
    click.echo(f"\n== {text} ==")
