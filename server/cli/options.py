"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

existing_directory = click.Path(exists=True, file_okay=False, path_type=Path)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
any_path = click.Path(path_type=Path)

server_option: Decorator = click.option(
    "--server",
    default="127.0.0.1:50051",
    show_default=True,
    envvar="TOKENWEIR_SERVER",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The server to call.",
)

timeout_option: Decorator = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of a request, waiting included.",
)

model_option: Decorator = click.option(
    "--model",
    required=True,
    metavar="NAME",
    help="A model of the server; `tokenweir models` lists them.",
)

version_option: Decorator = click.option(
    "--model-version",
    metavar="VERSION",
    help="Of the model; `tokenweir models` lists them.  [default: what is served]",
)

request_id_option: Decorator = click.option(
    "--request-id", metavar="UUID", help="Names the request in the server's log."
)

json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print all there is, one JSON object a line."
)


def examples(*lines: str) -> str:
    """Return an epilog that shows commands as they would be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
