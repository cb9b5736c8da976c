"""The command that makes a token."""

from __future__ import annotations

import hashlib
import json
import secrets

import click

from server.auth.tokens import problem_of
from server.cli.options import examples

_PREFIX = "tw_"  # by which people, and programs that look for secrets, know a token
_NUM_BYTES = 32


@click.command(
    epilog=examples(
        "tokenweir token --tenant acme >> tokens.toml",
        "tokenweir token --tenant acme --max-requests 8 --model dates >> tokens.toml",
        "tokenweir serve packages/dates --tokens tokens.toml",
    ),
)
@click.option("--tenant", required=True, metavar="NAME", help="Tenant of the calls.")
@click.option(
    "--max-priority",
    type=click.IntRange(-(2**31), 2**31 - 1),
    help="Lowest priority number its requests may use; lower runs earlier.  [default: 0]",
)
@click.option(
    "--max-requests", type=click.IntRange(1), help="Requests open at once.  [default: no limit]"
)
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(1),
    help="Tokens read and generated, a minute.  [default: no limit]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Allowed model; may be repeated.  [default: all]",
)
def token(
    tenant: str,
    max_priority: int | None,
    max_requests: int | None,
    tokens_per_minute: int | None,
    models: tuple[str, ...],
) -> None:
    """Make a token, and print its entry for a file of tokens.

    The token itself goes to the standard error, once: the entry has only its hash.
    Clients send it as TOKENWEIR_TOKEN or --token.
    """
    made = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    fields = {
        "sha256": hashlib.sha256(made.encode()).hexdigest(),
        "tenant": tenant,
        "max_priority": max_priority,
        "max_requests": max_requests,
        "tokens_per_minute": tokens_per_minute,
        "models": list(models) or None,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if problem := problem_of(name, value):
            raise click.UsageError(problem)
    lines = ["[[token]]"]
    for name, value in fields.items():  # strings and lists are in TOML as in JSON
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    click.echo("\n".join([*lines, ""]).encode())  # TOML is UTF-8 in every locale
    click.echo(f"the token of {tenant}, shown this once: {made}", err=True)
