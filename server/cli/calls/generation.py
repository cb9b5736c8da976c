"""The commands that generate texts and score given ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import click
from rich.table import Table
from rich.text import Text
from tokenweir import (
    Chat,
    Client,
    DeadlineExceeded,
    GeneratedSequence,
    GenerateOptions,
    Generation,
    InvalidArgument,
    PositionLogprobs,
    Prompt,
    ResourceExhausted,
    Result,
    ScoreOptions,
    StreamOptions,
)

from server.cli.calls.connection import answer_each, open_client
from server.cli.calls.generation_options import client_options, generation_options, prompt_of
from server.cli.calls.json_lines import print_json
from server.cli.calls.recorded import recording
from server.cli.calls.server_options import Server, server_option
from server.cli.options import (
    any_file,
    examples,
    json_option,
    model_option,
    request_id_option,
    timeout_option,
    version_option,
)
from server.cli.tables import print_table


@click.command(
    epilog=examples(
        'tokenweir generate --model dates "3rd of Feb, 1998"',
        'tokenweir generate --model dates "3rd of Feb, 1998" --beam 4 --num-outputs 2',
        'tokenweir generate --model text "Once upon" --temperature 0.8 --top-k 40',
        'tokenweir generate --model text "Is it so?" --choice yes --choice no',
        'tokenweir generate --model dates "3rd of Feb, 1998" --alignment',
        'tokenweir generate --model text "Once upon" --ban 17 --logit-bias 42=1.5',
        'tokenweir generate --model assistant --chat "What is a weir?"',
        "tokenweir generate --model dates < lines.txt",
        "tokenweir generate --model dates --json - < lines.txt > answers.jsonl",
    ),
)
@model_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@generation_options
@version_option
@request_id_option
@json_option
@click.option(
    "--record",
    type=any_file,
    metavar="FILE",
    help="Write requests and answers there, for `tokenweir replay`.",
)
@timeout_option
@server_option
def generate(
    model: str,
    texts: tuple[str, ...],
    as_json: bool,
    record: Path | None,
    timeout: float,
    server: Server,
    **typed: Any,
) -> int:
    """Generate from each TEXT and print the answer while it comes.

    If TEXT is missing or -, each line of the standard input is one, an empty line too.
    """
    options = _options(texts, timeout, typed)

    def answer(text: str) -> None:
        prompt = prompt_of(text, typed)
        if as_json:
            print_json(found := _whole_answer(client, model, prompt, options))
        elif options.get("num_outputs", 1) > 1:
            _print_result(found := client.generate(model, prompt, **options), typed)
        else:
            found = print_stream(client, model, prompt, cast("StreamOptions", options))
            _print_details(found.sequences[0], found, typed)  # the text has been streamed
        _print_prompt(found)
        note(model, prompt, options, found)

    def answer_together(texts: Sequence[str]) -> bool:
        results = _results(client, model, (prompt_of(text, typed) for text in texts), options)
        for result in results:
            _print_result(result, typed)
        return bool(results)

    alone = as_json or record is not None  # each has its own times, and its own seed
    with open_client(server) as client, recording(record) as note:
        return answer_each(
            texts,
            answer,
            answer_together=None if alone else answer_together,
            as_json=as_json,
        )


def _options(texts: Sequence[str], timeout: float, typed: dict[str, Any]) -> dict[str, Any]:
    options = client_options(typed)
    options["timeout"] = timeout
    if "request_id" in options and (len(texts) != 1 or "-" in texts):
        raise click.UsageError(
            f"--request-id {options['request_id']!r} names one request, and there are "
            f"{len(texts) if len(texts) > 1 else 'lines of the standard input'}; "
            "give one TEXT, or leave it out"
        )
    if "alignment" in options:
        options.setdefault("logprobs", 0)  # they name the tokens
    return options


@click.command(
    epilog=examples(
        'tokenweir score --model dates "3rd of Feb, 1998" 1998-02-03',
        'tokenweir score --model text "Once upon" " a time" --top-logprobs 3',
    ),
)
@model_option
@click.argument("source")
@click.argument("target")
@click.option("--top-logprobs", type=int, help="Print so many alternatives of every token.")
@version_option
@request_id_option
@json_option
@timeout_option
@server_option
def score(
    model: str, source: str, target: str, as_json: bool, server: Server, **options: Any
) -> None:
    """Print the log-probability of TARGET after SOURCE, then that of each of its tokens."""
    with open_client(server) as client:
        found = client.score(model, source, target, **cast("ScoreOptions", options))
    if as_json:
        print_json(found)
        return
    click.echo(f"{found.sum_logprob:.4f}")
    _print_logprobs(found.positions)


def print_stream(
    client: Client, model: str, prompt: Prompt | Chat, options: StreamOptions
) -> Generation:
    """Print the pieces of an answer as they come, and a line end; return the whole answer."""
    is_begun = False
    try:
        with client.stream(model, prompt, **options) as stream:
            for piece in stream:
                is_begun = True
                click.echo(piece, nl=False)
    finally:
        if is_begun:
            click.echo()  # an error after the first piece starts on a line of its own
    if not is_begun:
        click.echo()
    return stream.result


def _whole_answer(
    client: Client, model: str, prompt: Prompt | Chat, options: dict[str, Any]
) -> Generation:
    if options.get("num_outputs", 1) > 1:
        return client.generate(model, prompt, **cast("GenerateOptions", options))
    with client.stream(model, prompt, **cast("StreamOptions", options)) as stream:
        for _ in stream:
            pass
    return stream.result


def _results(
    client: Client, model: str, prompts: Iterable[Prompt | Chat], options: dict[str, Any]
) -> tuple[Result, ...]:
    """Return the results for prompts that are asked in one call; none if each is to be asked alone.

    That is, where one of them is wrong, or where there is no room or time for all at once.
    """
    asked = {name: value for name, value in options.items() if name != "tokens_per_message"}
    try:
        return client.generate_many(model, list(prompts), **cast("GenerateOptions", asked)).results
    except (ValueError, click.UsageError, InvalidArgument, DeadlineExceeded, ResourceExhausted):
        return ()


def _print_result(answer: Generation | Result, typed: dict[str, Any]) -> None:
    """Print every sequence, with its score where that orders them, and what else was asked for."""
    is_ranked = typed["beam"] is not None or typed["best_of"] is not None
    has_scores = is_ranked and (typed["num_outputs"] or 1) > 1
    for sequence in answer.sequences:
        click.echo(f"{sequence.score:.4f}\t{sequence.text}" if has_scores else sequence.text)
        _print_details(sequence, answer, typed)
    _print_prompt(answer)


def _print_details(
    sequence: GeneratedSequence, answer: Generation | Result, typed: dict[str, Any]
) -> None:
    """Print what was asked for besides the text of a sequence."""
    if typed["logprobs"] is not None:
        _print_logprobs(sequence.logprobs)
    if sequence.alignment:
        print_table(_alignment_table(sequence, answer.source_pieces))


def _print_prompt(answer: Generation | Result) -> None:
    if ids := answer.prompt_token_ids:
        tokens = zip(ids, answer.source_pieces, strict=True)
        click.echo("prompt\t" + "\t".join(f"{one} {_quoted(piece)}" for one, piece in tokens))
    if answer.prompt_logprobs:
        print_table(prompt_table(answer.prompt_logprobs))


def _print_logprobs(positions: Iterable[PositionLogprobs]) -> None:
    """Print a token a line: what it adds to the text, its log-probability, the alternatives."""
    for position in positions:
        tokens = (position.chosen, *position.top)
        click.echo("\t".join(f"{_quoted(one.piece)} {one.logprob:.4f}" for one in tokens))


def _alignment_table(sequence: GeneratedSequence, source_pieces: Sequence[bytes]) -> Table:
    """Return each generated token with the source token of its largest attention, one a row.

    The sequence has the attention and, for the names of its tokens, log-probabilities.
    """
    table = _table("Attention to the source", "token", "source token")
    table.add_column("at", justify="right")
    table.add_column("share", justify="right")
    for position, attention in zip(sequence.logprobs, sequence.alignment, strict=True):
        place = max(range(len(attention)), key=attention.__getitem__)
        source = _quoted(source_pieces[place]) if place < len(source_pieces) else "?"
        table.add_row(
            Text(_quoted(position.chosen.piece)),
            Text(source),
            f"{place + 1} of {len(attention)}",
            f"{attention[place]:.1%}",
        )
    return table


def prompt_table(positions: Iterable[PositionLogprobs]) -> Table:
    """Return each token of a prompt with its log-probability, its rank and the alternatives."""
    table = _table("Prompt, from its second token on", "token")
    for name in ("logprob", "rank"):
        table.add_column(name, justify="right")
    table.add_column("likeliest")
    for position in positions:
        chosen = position.chosen
        likeliest = ", ".join(f"{_quoted(one.piece)} {one.logprob:.4f}" for one in position.top)
        piece = Text(_quoted(chosen.piece))
        table.add_row(piece, f"{chosen.logprob:.4f}", str(chosen.rank), Text(likeliest))
    return table


def _quoted(piece: bytes) -> str:
    """Return a piece so that spaces, line ends and bytes of unfinished characters are seen."""
    return repr(piece.decode(errors="backslashreplace"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name)
    return table
