"""The commands that ask what a server has, and how it is: models, health."""

from __future__ import annotations

import click
from tokenweir import NotFound

from server.cli.connection import open_client
from server.cli.exit_codes import DONE, FAILED
from server.cli.json_lines import print_json
from server.cli.options import examples, json_option
from server.cli.server_options import Server, server_option
from server.cli.tables import model_table, print_table


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
