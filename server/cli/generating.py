"""The commands that generate texts and score given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
)

if TYPE_CHECKING:
    from server.client import (
        Client,
        GeneratedSequence,
        GenerateOptions,
        Generation,
        PositionLogprobs,
        StreamOptions,
    )

_OPTIONS = (
    click.option("--temperature", type=float, help="Above 0; asks for sampling."),
    click.option("--top-k", type=int, help="Sample among so many tokens; 0: all."),
    click.option("--top-p", type=float, help="Sample among this share of probability."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the best."),
    click.option("--typical-p", type=float, help="Sample among this share of typical tokens."),
    click.option("--seed", type=int, help="Of the sampling; the same seed, the same text."),
    click.option("--best-of", type=int, help="Sample so many, print the best."),
    click.option("--beam", type=int, metavar="WIDTH", help="Beam search with so many hypotheses."),
    click.option("--length-penalty", type=float, help="Of beam search.  [default: 0.6]"),
    click.option("--num-outputs", type=int, help="Answers to print; not streamed if many."),
    click.option("--repetition-penalty", type=float, help="Of tokens that were seen; 1: none."),
    click.option("--frequency-penalty", type=float, help="Of tokens, for every time; 0: none."),
    click.option("--presence-penalty", type=float, help="Of tokens of the answer; 0: none."),
    click.option("--no-repeat-ngram", type=int, help="No so many tokens twice; 0: none."),
    click.option(
        "--json-schema", type=existing_file, metavar="FILE", help="The answer is JSON of it."
    ),
    click.option("--regex", help="The answer matches it."),
    click.option(
        "--grammar", type=existing_file, metavar="FILE", help="The answer is a sentence of it."
    ),
    click.option("--choice", multiple=True, help="The answer is one of these; to be repeated."),
    click.option("--prefix", "target_prefix", metavar="TEXT", help="The answer begins with it."),
    click.option("--max-new-tokens", type=int, help="At most so many.  [default: model's]"),
    click.option("--min-new-tokens", type=int, help="No end before so many."),
    click.option("--stop", multiple=True, help="Stop at this string; may be repeated."),
    click.option("--logprobs", type=int, help="Print every token with so many alternatives."),
    click.option("--allow-partial", is_flag=True, help="At the deadline print what there is."),
    click.option("--priority", type=int, help="Lower runs earlier.  [default: 0]"),
    click.option("--tenant", help="Among whom the server is shared fairly."),
    click.option("--batch-invariant", is_flag=True, help="The same answer whatever else runs."),
)


def _generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for every option of the client that a person would type."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


@click.command(
    short_help="Generate, printing the answer while it comes.",
    epilog=examples(
        'tokenweir generate --model dates "3rd of Feb, 1998"',
        'tokenweir generate --model dates "3rd of Feb, 1998" --beam 4 --num-outputs 2',
        'tokenweir generate --model text "Once upon" --temperature 0.8 --top-k 40 --seed 7',
        'tokenweir generate --model text "Is it so?" --choice yes --choice no --logprobs 3',
        "tokenweir generate --model dates < lines.txt",
    ),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@_generation_options
@timeout_option
@server_option
def generate(model: str, texts: tuple[str, ...], timeout: float, server: str, **typed: Any) -> None:
    """Generate from each TEXT and print the answer while it comes.

    Without TEXT, every line of the standard input is one.
    """
    options = _client_options(typed)
    options["timeout"] = timeout
    with open_client(server) as client:
        for text in texts or input_lines():
            if options.get("num_outputs", 1) > 1:
                _print_outputs(client, model, text, cast("GenerateOptions", options))
            else:
                answer = print_stream(client, model, text, cast("StreamOptions", options))
                _print_logprobs(answer.sequences[0].logprobs)


@click.command(
    short_help="Print the log-probability of a given answer.",
    epilog=examples(
        'tokenweir score --model dates "3rd of Feb, 1998" 1998-02-03',
        'tokenweir score --model text "Once upon" " a time" --top-logprobs 3',
    ),
)
@model_option
@click.argument("source")
@click.argument("target")
@click.option("--top-logprobs", type=int, help="Print so many alternatives of every token.")
@timeout_option
@server_option
def score(
    model: str, source: str, target: str, top_logprobs: int | None, timeout: float, server: str
) -> None:
    """Print the log-probability of TARGET behind SOURCE, then that of each of its tokens."""
    with open_client(server) as client:
        found = client.score(model, source, target, top_logprobs=top_logprobs, timeout=timeout)
    click.echo(f"{found.sum_logprob:.4f}")
    _print_logprobs(found.positions)


def print_stream(client: Client, model: str, text: str, options: StreamOptions) -> Generation:
    """Print the pieces of an answer as they come, and a line end; return the whole answer."""
    is_begun = False
    try:
        with client.stream(model, text, **options) as stream:
            for piece in stream:
                is_begun = True
                click.echo(piece, nl=False)
    finally:
        if is_begun:
            click.echo()  # an error after the first piece starts on a line of its own
    if not is_begun:
        click.echo()
    return stream.result


def _client_options(typed: dict[str, Any]) -> dict[str, Any]:
    """Return what was typed as options of the client; files are read."""
    return {
        name: value.read_text() if isinstance(value, Path) else value
        for name, value in typed.items()
        if value is not None and value is not False and value != ()
    }


def _print_outputs(client: Client, model: str, text: str, options: GenerateOptions) -> None:
    is_ranked = "beam" in options or "best_of" in options
    for sequence in client.generate(model, text, **options).sequences:
        click.echo(_scored(sequence) if is_ranked else sequence.text)
        _print_logprobs(sequence.logprobs)


def _scored(sequence: GeneratedSequence) -> str:
    return f"{sequence.score:.4f}\t{sequence.text}"


def _print_logprobs(positions: Iterable[PositionLogprobs]) -> None:
    """Print a token a line: what it adds to the text, its log-probability, the alternatives."""
    for position in positions:
        tokens = (position.chosen, *position.top)
        click.echo("\t".join(f"{_quoted(one.piece)} {one.logprob:.4f}" for one in tokens))


def _quoted(piece: bytes) -> str:
    """Return a piece so that spaces, line ends and bytes of unfinished characters are seen."""
    return repr(piece.decode(errors="backslashreplace"))
