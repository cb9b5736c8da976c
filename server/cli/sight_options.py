"""Options of what operators see of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from server.cli.options import Decorator

_OTHERS: tuple[Decorator, ...] = (
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        help="Answer Prometheus at HOST:PORT/metrics; 0: any free port.  [default: none]",
    ),
    click.option(
        "--metrics-host",
        default="127.0.0.1",
        show_default=True,
        help="Interface of that port; one that others reach needs --tls-cert and --admin-tokens.",
    ),
    click.option(
        "--otlp-endpoint",
        metavar="URL",
        help="Send spans of calls there, by OTLP over HTTP, such as to http://127.0.0.1:4318.",
    ),
)
LOG_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Of what is logged, to the standard error; of every request a worker logs a line at "
        "info.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Lines for people, or a JSON object a line.",
    ),
)


def sight_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options."""
    for option in reversed((*_OTHERS, *LOG_OPTIONS)):
        command = option(command)
    return command
