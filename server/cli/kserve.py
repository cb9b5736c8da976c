"""The command that answers the Open Inference Protocol over gRPC, in front of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from server.adapters.config import kserve_config
from server.adapters.kserve.serving import serve
from server.cli.adapter import Adapter
from server.cli.options import examples
from server.cli.server_options import Server, server_option
from server.cli.setting_options import given_settings, print_settings, setting_options


@click.command(
    "kserve",
    epilog=examples(
        "tokenweir kserve --port 8001",
        "tokenweir kserve --server server.example:50051 --tls-ca ca.pem --port 8001",
        "tokenweir kserve --config serve.toml",
    ),
)
@setting_options("kserve")
@server_option
def kserve(server: Server, file: Path | None, print_config: bool, **typed: Any) -> None:
    """Answer the Open Inference Protocol (KServe v2) over gRPC: generations, also as streams,
    classes, labels, vectors. Over HTTP it is answered by `tokenweir http`.

    It is a client of the server at --server. The bearer token of a call goes there with it; a call
    without one is sent with --token, if that is given. The FILE may be that of the service: it
    listens on the same host, and `[kserve]` has its port and limits.
    """
    given = given_settings("kserve", file, typed)
    settings = given.settings()
    if print_config:
        return print_settings(given)
    Adapter(
        server, settings, kserve_config(settings), serve, "the Open Inference Protocol at {}"
    ).run()
