"""The command that runs a gateway by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.door_options import door_options
from server.cli.extras import needs
from server.cli.given_settings import (
    config_option,
    print_config_option,
    print_settings,
    settings_of,
)
from server.cli.options import Number, examples
from server.cli.service import say
from server.cli.sight_options import sight_options

if TYPE_CHECKING:
    from server.gateway.gateway import Gateway


@click.command(
    short_help="Run one more gateway before the workers of a service.",
    epilog=examples(
        "RAY_ADDRESS=10.0.0.1:6379 tokenweir serve packages/dates --no-gateway",
        "tokenweir gateway --ray-address 10.0.0.1:6379",
        "tokenweir gateway --ray-address 10.0.0.1:6379 --name other --port 50052",
        "tokenweir gateway --ray-address 10.0.0.1:6379 --config serve.toml",
        "tokenweir gateway --config serve.toml --print-config",
    ),
)
@click.option(
    "--ray-address",
    envvar="RAY_ADDRESS",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The head of the Ray cluster that the service runs on.  [required]",
)
@click.option("--name", default="tokenweir", show_default=True, help="Name of the service.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=50051,
    show_default=True,
    help="Port of the gateway; 0: any free one.",
)
@click.option(
    "--prefix-affinity/--no-prefix-affinity",
    default=True,
    show_default=True,
    help="Send a prompt to the worker that last had one with the same beginning, while others have "
    "about as much to do.",
)
@click.option(
    "--grace",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Requests in flight at SIGTERM or Ctrl-C get this long to finish.",
)
@door_options
@sight_options
@config_option
@print_config_option
@needs("serve")
def gateway(ray_address: str | None, file: Path | None, print_config: bool, **typed: Any) -> None:
    """Relay calls to the workers of a service on a Ray cluster, until SIGTERM or Ctrl-C.

    Run as many as are wanted, where the workers can be reached; none knows of another, and each
    hears from the service which workers there are and how much they have to do. It waits for the
    service, and stays when that is started anew. The FILE may be that of the service: what it says
    of workers is not looked at.
    """
    from server.ray.gateway_role import run_gateway
    from server.telemetry.logs import log_to_stderr

    settings = settings_of("gateway", file, typed)
    if ray_address is None and not print_config:
        raise click.UsageError("give --ray-address (or RAY_ADDRESS), where the service runs")
    config = settings.gateway_role(ray_address or "any:0")
    if print_config:
        return print_settings(settings)

    def announce(address: str, running: Gateway) -> None:
        if running.admin_port is not None:
            say(f"operated on port {running.admin_port}", config.log)
        click.echo(f"relaying to {config.name} on {address}; Ctrl-C stops")

    log_to_stderr(config.log)
    run_gateway(config, announce)
