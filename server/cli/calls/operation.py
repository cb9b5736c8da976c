"""The commands that ask how a server is, and those that operate it at its admin port."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from tokenweir import ModelInfo, NotFound

from server.cli.calls.connection import open_client
from server.cli.calls.json_lines import print_json
from server.cli.calls.server_options import Server, server_option
from server.cli.exit_codes import DONE, FAILED
from server.cli.options import Number, examples, json_option
from server.cli.tables import model_table, print_table

_percent = Number(min=0, max=100)


@click.command(
    epilog=examples(
        "tokenweir models",
        "tokenweir models --server 10.0.0.7:50051",
        "tokenweir models --json",
    ),
)
@json_option
@server_option
def models(as_json: bool, server: Server) -> None:
    """List what the server serves: states, capabilities, limits, certificates."""
    with open_client(server) as client:
        found = client.models()
    if as_json:
        for model in found:
            print_json(model)
        return

    for model in found:
        print_table(model_table(model))
    if not found:
        click.echo(f"{server} serves no model")


@click.command(
    epilog=examples(
        "tokenweir health",
        "tokenweir health dates",
        "tokenweir health tokenweir.v1.GenerationService",
    ),
)
@click.argument("service", default="", metavar="[SERVICE]")
@json_option
@server_option
def health(service: str, as_json: bool, server: Server) -> int:
    """Print the health of the server, or of one SERVICE or model; exit with 1 if not SERVING."""
    with open_client(server) as client:
        try:
            status = client.health(service)
        except NotFound as error:
            raise click.ClickException(
                f"{server} has no service or model {service!r}; `tokenweir models` lists the models"
            ) from error
    if as_json:
        print_json({"service": service, "status": status})
    else:
        click.echo(status)
    return DONE if status == "SERVING" else FAILED


@click.command(
    "load-model",
    epilog=examples(
        "tokenweir load-model packages/dates-2 --canary 5 --server localhost:50052",
        "tokenweir load-model s3://m/dates-2 --replicas 2 --server localhost:50052",
    ),
)
@click.argument("package", metavar="PACKAGE")
@click.option("--model", metavar="NAME", help="Serve it under another name than its own.")
@click.option("--model-version", metavar="VERSION", help="Load no other version than this.")
@click.option(
    "--replicas", type=click.IntRange(1), help="Worker processes.  [default: as at the start]"
)
@click.option(
    "--canary",
    "share",
    type=_percent,
    metavar="PERCENT",
    help="Share of the calls that name no version.  [default: 0; 100 if no other version serves]",
)
@click.option("--check", "validate_only", is_flag=True, help="Check the package only.")
@json_option
@server_option
def load_model(package: str, as_json: bool, server: Server, **options: Any) -> None:
    """Load a PACKAGE, a directory or URL as the server sees it; return when it takes calls.

    It gets worker processes of its own. If that fails, the models that serve are not affected.
    --server is the admin port.
    """
    if Path(package).is_dir():
        package = str(Path(package).resolve())  # the server has another working directory
    with open_client(server) as client:
        info = client.load_model(package, **options)
    if options["validate_only"] and not as_json:
        click.echo(f"{info.model} {info.model_version} can be loaded")
    else:
        _print([info], as_json)


@click.command(
    "traffic",
    epilog=examples("tokenweir traffic dates 2 100 --server localhost:50052"),
)
@click.argument("model", metavar="MODEL")
@click.argument("model_version", metavar="VERSION")
@click.argument("share", type=_percent, metavar="PERCENT")
@json_option
@server_option
def traffic(model: str, model_version: str, share: float, as_json: bool, server: Server) -> None:
    """Give a VERSION so many PERCENT of the calls for a MODEL that name no version.

    The others share the rest as before. --server is the admin port.
    """
    with open_client(server) as client:
        _print(client.set_traffic(model, model_version, share), as_json)


@click.command(
    "unload-model",
    epilog=examples("tokenweir unload-model dates 1 --server localhost:50052"),
)
@click.argument("model", metavar="MODEL")
@click.argument("model_version", default="", metavar="[VERSION]")
@json_option
@server_option
def unload_model(model: str, model_version: str, as_json: bool, server: Server) -> None:
    """End a VERSION of a MODEL: it gets no new calls, and its processes end after the last one.

    --server is the admin port.
    """
    with open_client(server) as client:
        client.unload_model(model, model_version)
        left = [info for info in client.models() if info.model == model]
    if left or as_json:
        _print(left, as_json)
    else:
        click.echo(f"{server} serves no {model} any more")


def _print(models: Iterable[ModelInfo], as_json: bool) -> None:
    for info in models:
        if as_json:
            print_json(info)
        elif info.traffic is None:
            click.echo(f"{info.model} {info.model_version}: {info.state}")
        else:
            click.echo(
                f"{info.model} {info.model_version}: {info.state}, {info.traffic.share:g} % of the "
                f"calls, workers: {info.traffic.replicas}"
            )
