"""The commands that call a running server."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from server.cli.options import (
    examples,
    existing_file,
    model_option,
    server_option,
    timeout_option,
)

if TYPE_CHECKING:
    from server.client import Client, GenerateOptions, StreamOptions


def _generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for every field of SamplingParams that a person would type."""
    for decorate in reversed(
        (
            click.option("--temperature", type=float, help="Above 0; asks for sampling."),
            click.option("--top-k", type=int, help="Sample among so many tokens; 0: all."),
            click.option("--top-p", type=float, help="Sample among this share of probability."),
            click.option("--min-p", type=float, help="Drop tokens below this share of the best."),
            click.option("--seed", type=int, help="Of the sampling; the same seed, the same text."),
            click.option("--num-outputs", type=int, help="Sampled answers; not streamed if many."),
            click.option("--max-new-tokens", type=int, help="At most so many.  [default: model's]"),
            click.option("--min-new-tokens", type=int, help="No end before so many."),
            click.option("--stop", multiple=True, help="Stop at this string; may be repeated."),
        )
    ):
        command = decorate(command)
    return command


@click.command(
    short_help="Generate, printing the answer while it comes.",
    epilog=examples(
        'tokenweir generate --model dates "3rd of Feb, 1998"',
        'tokenweir generate --model text "Once upon" --temperature 0.8 --top-k 40 --seed 7',
        "tokenweir generate --model dates < lines.txt",
    ),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@_generation_options
@timeout_option
@server_option
def generate(
    model: str, texts: tuple[str, ...], timeout: float, server: str, **sampling: Any
) -> None:
    """Generate from each TEXT and print the answer while it comes.

    Without TEXT, every line of the standard input is one.
    """
    options = {name: value for name, value in sampling.items() if value not in (None, ())}
    options["timeout"] = timeout
    with _client(server) as client:
        for text in texts or _input_lines():
            if options.get("num_outputs", 1) > 1:
                _print_outputs(client, model, text, cast("GenerateOptions", options))
            else:
                print_stream(client, model, text, cast("StreamOptions", options))


def print_stream(client: Client, model: str, text: str, options: StreamOptions) -> str:
    """Print the pieces of an answer as they come, and a line end; return the answer."""
    pieces = []
    try:
        with client.stream(model, text, **options) as stream:
            for piece in stream:
                pieces.append(piece)
                click.echo(piece, nl=False)
    finally:
        if pieces:
            click.echo()  # an error after the first piece starts on a line of its own
    if not pieces:
        click.echo()
    return "".join(pieces)


def _print_outputs(client: Client, model: str, text: str, options: GenerateOptions) -> None:
    for sequence in client.generate(model, text, **options).sequences:
        click.echo(sequence.text)


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
    with _client(server) as client:
        items: list[str | Path] = [*texts, *images]
        for item in items or _input_lines():
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
    with _client(server) as client:
        for text in texts or _input_lines():
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
    with _client(server) as client:
        for text in texts or _input_lines():
            vector = client.embed(model, text, normalize=normalize, timeout=timeout)
            click.echo(json.dumps(vector.values))


@click.command(
    short_help="List what a server serves.",
    epilog=examples("tokenweir models", "tokenweir models --server 10.0.0.7:50051"),
)
@server_option
def models(server: str) -> None:
    """List what the server serves: states, capabilities, limits, certificates."""
    with _client(server) as client:
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

    with _client(server) as client:
        try:
            status = client.health(service)
        except NotFound as error:
            raise click.ClickException(
                f"{server} has no service or model {service!r}; `tokenweir models` lists the models"
            ) from error
    click.echo(status)
    return 0 if status == "SERVING" else 1


@contextlib.contextmanager
def _client(server: str) -> Iterator[Client]:
    from server.client import Client, Unavailable

    try:
        with Client(server) as client:
            yield client
    except ValueError as error:  # what was typed cannot be sent at all
        raise click.ClickException(str(error)) from error
    except Unavailable as error:
        if error.reason:
            raise  # a server has answered
        raise click.ClickException(
            f"no server answers at {server}; start one with `tokenweir serve`, or give --server "
            f"({error.args[0]})"
        ) from error


def _input_lines() -> Iterator[str]:
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
