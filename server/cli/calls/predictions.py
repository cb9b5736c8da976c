"""The commands that ask a server for predictions: classify, label, embed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click
from tokenweir import Aggregation, PredictOptions

from server.cli.calls.connection import answer_each, open_client
from server.cli.calls.json_lines import print_json
from server.cli.calls.server_options import Server, server_option
from server.cli.options import (
    examples,
    existing_file,
    json_option,
    model_option,
    timeout_option,
    version_option,
)

truncate_option = click.option(
    "--truncate",
    type=click.Choice(["left", "right"]),
    help="Cut this side off texts that are too long.  [default: they are refused]",
)


@click.command(
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
@truncate_option
@version_option
@json_option
@timeout_option
@server_option
def classify(
    model: str,
    texts: tuple[str, ...],
    images: tuple[Path, ...],
    top: int,
    as_json: bool,
    server: Server,
    **options: Any,
) -> int:
    """Print the most likely labels of each TEXT or image, with their probabilities.

    If TEXT is missing or -, each line of the standard input is one.
    """
    sent = cast("PredictOptions", options)

    def answer(item: str | Path) -> None:
        found = client.classify(model, item, top=top, **sent)
        if as_json:
            print_json(found)
        else:
            for one in found.labels:
                click.echo(f"{one.label}\t{one.probability:.4f}")

    items: list[str | Path] = [*texts, *images]
    with open_client(server) as client:
        return answer_each(items, answer, as_json=as_json)


@click.command(
    epilog=examples('tokenweir label --model tagging "I saw a saw"'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--aggregation",
    type=click.Choice(["simple", "first", "average", "max"]),
    help="Print entities instead of tokens; the last three keep words whole.",
)
@click.option(
    "--stride",
    type=int,
    metavar="TOKENS",
    help="Label texts that are too long in windows that share so many tokens.",
)
@truncate_option
@version_option
@json_option
@timeout_option
@server_option
def label(
    model: str,
    texts: tuple[str, ...],
    aggregation: Aggregation | None,
    stride: int | None,
    as_json: bool,
    server: Server,
    **options: Any,
) -> int:
    """Print every labelled span of each TEXT with its label.

    If TEXT is missing or -, each line of the standard input is one.
    """
    sent = cast("PredictOptions", options)

    def answer(text: str) -> None:
        found = client.label(model, text, aggregation=aggregation, stride=stride, **sent)
        if as_json:
            print_json(found)
        else:
            for span in found.spans:
                click.echo(f"{span.text}\t{span.label.label}")

    with open_client(server) as client:
        return answer_each(texts, answer, as_json=as_json)


@click.command(
    epilog=examples('tokenweir embed --model sentiment "a fine film" --normalize'),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--normalize", is_flag=True, help="Scale to length 1.")
@click.option("--prompt-name", metavar="NAME", help="The model's prompt in front of each TEXT.")
@click.option("--pair", "text_pair", metavar="TEXT", help="The second text of each pair.")
@truncate_option
@version_option
@timeout_option
@server_option
def embed(
    model: str,
    texts: tuple[str, ...],
    normalize: bool,
    prompt_name: str | None,
    server: Server,
    **options: Any,
) -> int:
    """Print the vector of each TEXT as a JSON list, one a line.

    If TEXT is missing or -, each line of the standard input is one.
    """
    sent = cast("PredictOptions", options)

    def answer(text: str) -> None:
        found = client.embed(model, text, normalize=normalize, prompt_name=prompt_name, **sent)
        print_json(found.values)

    with open_client(server) as client:
        return answer_each(texts, answer, as_json=True)
