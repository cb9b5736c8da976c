"""The commands that ask a running server for predictions, and what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from server.cli.connection import input_lines, open_client
from server.cli.options import (
    examples,
    existing_file,
    model_option,
    server_option,
    timeout_option,
    version_option,
)

if TYPE_CHECKING:
    from server.client import PredictOptions


@click.command(
    short_help="Print the most likely labels of texts or images.",
    epilog=examples(
        'tokenweir classify --model sentiment "not a bad film at all"',
        "tokenweir classify --model digits --image seven.png --top 3",
    ),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--image", "images", type=existing_file, multiple=True, help="PNG or JPEG file.")
@click.option("--top", type=click.IntRange(0), default=1, help="Labels to print; 0: all.")
@click.option("--pair", "text_pair", metavar="TEXT", help="The second text of each pair.")
@version_option
@timeout_option
@server_option
def classify(
    model: str,
    texts: tuple[str, ...],
    images: tuple[Path, ...],
    top: int,
    server: str,
    **options: Any,
) -> None:
    """Print the most likely labels of each TEXT or image, with their probabilities."""
    sent = cast("PredictOptions", options)
    with open_client(server) as client:
        items: list[str | Path] = [*texts, *images]
        for item in items or input_lines():
            for found in client.classify(model, item, top=top, **sent).labels:
                click.echo(f"{found.label}\t{found.probability:.4f}")


@click.command(
    short_help="Label the words of texts.",
    epilog=examples('tokenweir label --model tagging "I saw a saw"'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@version_option
@timeout_option
@server_option
def label(model: str, texts: tuple[str, ...], server: str, **options: Any) -> None:
    """Print every labelled stretch of each TEXT with its label."""
    sent = cast("PredictOptions", options)
    with open_client(server) as client:
        for text in texts or input_lines():
            for span in client.label(model, text, **sent).spans:
                click.echo(f"{span.text}\t{span.label.label}")


@click.command(
    short_help="Print the vectors of texts.",
    epilog=examples('tokenweir embed --model sentiment "a fine film" --normalize'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--normalize", is_flag=True, help="Scale to length 1.")
@click.option("--pair", "text_pair", metavar="TEXT", help="The second text of each pair.")
@version_option
@timeout_option
@server_option
def embed(model: str, texts: tuple[str, ...], normalize: bool, server: str, **options: Any) -> None:
    """Print the vector of each TEXT as a JSON list, one a line."""
    sent = cast("PredictOptions", options)
    with open_client(server) as client:
        for text in texts or input_lines():
            vector = client.embed(model, text, normalize=normalize, **sent)
            click.echo(json.dumps(vector.values))


@click.command(
    short_help="List what a server serves.",
    epilog=examples("tokenweir models", "tokenweir models --server 10.0.0.7:50051"),
)
@server_option
def models(server: str) -> None:
    """List what the server serves: states, capabilities, limits, certificates."""
    with open_client(server) as client:
        found = client.models()
    from server.cli.tables import models_table, print_table

    print_table(models_table(found))


@click.command(
    short_help="Print the health of a server, service or model.",
    epilog=examples(
        "tokenweir health",
        "tokenweir health dates",
        "tokenweir health tokenweir.v1.GenerationService",
    ),
)
@click.argument("service", default="", metavar="[SERVICE]")
@server_option
def health(service: str, server: str) -> int:
    """Print the health of the server, or of one SERVICE or model; exit with 1 if not SERVING."""
    from server.client import NotFound

    with open_client(server) as client:
        try:
            status = client.health(service)
        except NotFound as error:
            raise click.ClickException(
                f"{server} has no service or model {service!r}; `tokenweir models` lists the models"
            ) from error
    click.echo(status)
    return 0 if status == "SERVING" else 1
