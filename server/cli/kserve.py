"""The command that answers the Open Inference Protocol over gRPC, in front of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from server.cli.front import Front, front_options
from server.cli.given_settings import print_settings, settings_of
from server.cli.options import examples
from server.cli.server_options import Server, server_option


@click.command(
    "kserve",
    short_help="Answer KServe's protocol over gRPC, in front of a server.",
    epilog=examples(
        "tokenweir kserve --port 8001",
        "tokenweir kserve --server server.example:50051 --tls-ca ca.pem --port 8001",
        "tokenweir kserve --config serve.toml",
    ),
)
@front_options(port=8001)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(1),
    default=16 << 20,
    show_default=True,
    help="Of one request; a longer one is refused.",
)
@server_option
def kserve(server: Server, file: Path | None, print_config: bool, **typed: Any) -> None:
    """Answer the Open Inference Protocol (KServe v2) over gRPC: generations, classes, labels,
    vectors, each as a whole.

    It is a client of the server at --server. The bearer token of a call goes there with it; a call
    without one is sent with --token, if that is given. The FILE may be that of the service: it
    listens at the host of that, and `[kserve]` has its port and bounds.
    """
    from server.kserve.serving import serve

    settings = settings_of("kserve", file, typed)
    config = settings.kserve()
    if print_config:
        return print_settings(settings)
    Front(server, settings, config, serve, "the Open Inference Protocol at {}").run()
