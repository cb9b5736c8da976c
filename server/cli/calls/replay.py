"""The command that asks a recorded request again, and says whether the answer has the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
from tokenweir import Client, GenerateOptions, compare

from server.cli.calls.connection import open_client
from server.cli.calls.json_lines import plain
from server.cli.calls.recorded import Recorded, read_recorded
from server.cli.calls.server_options import Server, server_option
from server.cli.exit_codes import DONE, FAILED, NOT_USABLE, CommandError
from server.cli.options import examples, existing_file, timeout_option

# Possible causes of a difference: fields of Provenance, as people call them.
_CAUSES = {
    "manifest_sha256": "package",
    "model_version": "version of the model",
    "server_version": "version of the server",
    "processor": "processor",
    "threads": "threads",
    "determinism": "determinism",
}


@click.command(
    epilog=examples(
        'tokenweir generate --model dates --record dates.jsonl "3rd of Feb, 1998"',
        "tokenweir replay dates.jsonl",
    ),
)
@click.argument("file", type=existing_file)
@timeout_option
@server_option
def replay(file: Path, timeout: float, server: Server) -> int:
    """Ask every request of FILE again, with its original seed.

    FILE was written by `tokenweir generate --record FILE`. Every request is reported as bit-equal,
    or with its differences: where the answer came from, and the first token that differs.
    """
    code = DONE
    with open_client(server) as client:
        for number, recorded in enumerate(read_recorded(file), start=1):
            found = list(differences(recorded, _asked_again(client, recorded, timeout)))
            click.echo(f"request {number}: {'; '.join(found) or 'bit-equal'}")
            if found:
                code = FAILED
    return code


def _asked_again(client: Client, recorded: Recorded, timeout: float) -> dict[str, Any]:
    """Return the answer that comes now, as JSON has it."""
    options = dict(recorded.options)
    if seed := recorded.answer["provenance"]["seed"]:
        options.setdefault("seed", seed)
    options["timeout"] = timeout
    asked = cast("GenerateOptions", options)
    try:
        answer = client.generate(recorded.model, recorded.prompt, **asked)
    except (TypeError, ValueError) as error:  # it names what it cannot send
        message = f"{recorded.place} cannot be asked again: {error}"
        raise CommandError(message, NOT_USABLE) from error
    return cast(dict[str, Any], plain(answer))


def differences(recorded: Recorded, now: dict[str, Any]) -> Iterator[str]:
    """Return the differences of an answer from what it was; none if all bits are the same.

    Its origin is named only if its bits are others.
    """
    before = recorded.answer
    found = [
        difference
        for i, pair in enumerate(zip(before["sequences"], now["sequences"], strict=False))
        if (difference := _difference(i, *pair))
    ]
    if len(before["sequences"]) != len(now["sequences"]):
        found.append(f"{len(now['sequences'])} sequences in place of {len(before['sequences'])}")
    for name in ("prompt_logprobs", "source_pieces"):
        if before[name] != now[name]:
            found.append(f"{name.replace('_', ' ')} differ")
    if not found:
        return
    yield from found
    same = True
    for name, cause in _CAUSES.items():
        was, is_now = (one["provenance"].get(name) for one in (before, now))
        if was != is_now:
            same = False
            yield f"{cause} was {was or 'not said'}, is {is_now or 'not said'}"
    if same:
        yield "from the same package, server, processor and threads"


def _difference(index: int, was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs of a sequence; "" if nothing does."""
    where = f"sequence {index}"
    found = {one.field: one for one in compare.differences(was, now)}
    if (tokens := found.get("token_ids")) is not None:
        first = tokens.place
        a, b = ((ids[first : first + 1] or ["none"])[0] for ids in (tokens.wanted, tokens.got))
        return f"{where}: token {first} was {a}, is {b}"
    return f"{where}: the same tokens, but other {', '.join(found)}" if found else ""
