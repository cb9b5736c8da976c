"""The command that runs a gateway by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from server.cli.extras import needs
from server.cli.options import examples
from server.cli.serving.service import say
from server.cli.serving.setting_options import setting_options, settings_of
from server.given_settings import GivenSettings
from server.process import prepare_to_relay
from server.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    from server.gateway.gateway import Gateway


@click.command(
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
@setting_options("gateway")
@needs("serve")
def gateway(ray_address: str | None, given: GivenSettings) -> None:
    """Relay calls to the workers of a service on a Ray cluster, until SIGTERM or Ctrl-C.

    Run as many as are wanted, where the workers can be reached; none knows of another, and each
    hears from the service which workers there are and how much they have to do. It waits for the
    service, and keeps running when the service restarts. The FILE may be that of the service:
    settings of workers are ignored.
    """
    config = settings_of(given, is_served=True)
    if ray_address is None:
        raise click.UsageError("give --ray-address (or RAY_ADDRESS), where the service runs")
    if not re.fullmatch(r"[^/]+:\d+", ray_address):
        raise click.UsageError(
            f"--ray-address ({ray_address}) must be HOST:PORT of the cluster's head, such as "
            "10.0.0.1:6379"
        )

    prepare_to_relay()  # before anything imports gRPC
    from server.ray.gateway_role import run_gateway

    def announce(address: str, running: Gateway) -> None:
        if running.admin_port is not None:
            say(f"operated on port {running.admin_port}", config.log)
        click.echo(f"relaying to {config.listen.name} on {address}; Ctrl-C stops")

    log_to_stderr(config.log)
    run_gateway(config, ray_address, announce)
