"""The commands that ask a running server for predictions, and what it is."""

from __future__ import annotations

import json
from pathlib import Path

import click

from server.cli.connection import input_lines, open_client
from server.cli.options import (
    examples,
    existing_file,
    model_option,
    server_option,
    timeout_option,
)


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
@timeout_option
@server_option
def classify(
    model: str,
    texts: tuple[str, ...],
    images: tuple[Path, ...],
    top: int,
    timeout: float,
    server: str,
) -> None:
    """Print the most likely labels of each TEXT or image, with their probabilities."""
    with open_client(server) as client:
        items: list[str | Path] = [*texts, *images]
        for item in items or input_lines():
            for found in client.classify(model, item, top=top, timeout=timeout).labels:
                click.echo(f"{found.label}\t{found.probability:.4f}")


@click.command(
    short_help="Label the words of texts.",
    epilog=examples('tokenweir label --model tagging "I saw a saw"'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@timeout_option
@server_option
def label(model: str, texts: tuple[str, ...], timeout: float, server: str) -> None:
    """Print every labelled stretch of each TEXT with its label."""
    with open_client(server) as client:
        for text in texts or input_lines():
            for span in client.label(model, text, timeout=timeout).spans:
                click.echo(f"{span.text}\t{span.label.label}")


@click.command(
    short_help="Print the vectors of texts.",
    epilog=examples('tokenweir embed --model sentiment "a fine film" --normalize'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--normalize", is_flag=True, help="Scale to length 1.")
@timeout_option
@server_option
def embed(model: str, texts: tuple[str, ...], normalize: bool, timeout: float, server: str) -> None:
    """Print the vector of each TEXT as a JSON list, one a line."""
    with open_client(server) as client:
        for text in texts or input_lines():
            vector = client.embed(model, text, normalize=normalize, timeout=timeout)
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
