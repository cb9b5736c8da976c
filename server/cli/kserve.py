"""The command that answers the Open Inference Protocol over gRPC, in front of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from server.cli.front import Front, front_options
from server.cli.options import examples
from server.cli.server_options import Server, server_option

if TYPE_CHECKING:
    from server.config import LogConfig


@click.command(
    "kserve",
    short_help="Answer KServe's protocol over gRPC, in front of a server.",
    epilog=examples(
        "tokenweir kserve --port 8001",
        "tokenweir kserve --server server.example:50051 --tls-ca ca.pem --port 8001",
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
def kserve(insecure: bool, server: Server, log: LogConfig, **settings: Any) -> None:
    """Answer the Open Inference Protocol (KServe v2) over gRPC: generations, classes, labels,
    vectors, each as a whole.

    It is a client of the server at --server. The bearer token of a call goes there with it; a call
    without one is sent with --token, if that is given.
    """
    from server.kserve.config import KserveConfig
    from server.kserve.serving import serve

    config = KserveConfig(**settings)
    Front(server, config, serve, "the Open Inference Protocol at {}", insecure, log).run()
