"""The command that lists and removes what the user's cache holds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.table import Table

from engine.errors import PackageError
from server.cli.extras import needs
from server.cli.options import Parsed, examples, json_option
from server.cli.tables import print_table

if TYPE_CHECKING:
    from server.packages.kept import Kept

_PREFIXES = ["", "k", "m", "g", "t"]


def _read_size(text: str) -> float:
    """Turn "20GB" into bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text[:100]!r} is no size, as 20GB or 500M are.")
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** _PREFIXES.index(found[2].lower())


@click.command(
    epilog=examples(
        "tokenweir cache",
        "tokenweir cache --remove opus-mt-3f2a9c0d11b7e645",
        "tokenweir cache --max-size 20GB",
    )
)
@click.option("--remove", "keys", multiple=True, metavar="KEY", help="Remove it; may be repeated.")
@click.option("--clear", is_flag=True, help="Remove all.")
@click.option(
    "--max-size",
    type=Parsed("size", _read_size),
    metavar="SIZE",
    help="Remove the least recently used until at most SIZE is left.",
)
@json_option
@needs("cpu")
def cache(keys: tuple[str, ...], clear: bool, max_size: float | None, as_json: bool) -> None:
    """List the packages and checkpoints that were built or fetched here, and remove some.

    They are in TOKENWEIR_CACHE, else in ~/.cache/tokenweir. A server keeps running with a package
    that is removed, but a worker that starts later no longer finds it.
    """
    from server.packages.kept import kept

    found = kept()
    if unknown := sorted({*keys} - {one.key for one in found}):
        raise click.UsageError(f"the cache has no {unknown[0]}; `tokenweir cache` lists its keys")
    room = float("inf") if max_size is None else max_size
    rest: list[Kept] = []
    problems: list[str] = []
    for one in found:
        is_asked = clear or one.key in keys
        room -= 0 if is_asked else one.num_bytes
        try:
            if is_asked or room < 0:
                one.remove()
                click.echo(f"removed {one.key}", err=True)
            else:
                rest.append(one)
        except PackageError as error:
            problems.append(str(error))
            rest.append(one)
    _show(rest, as_json=as_json)
    if problems:
        raise PackageError("; ".join(problems))


def _show(rest: list[Kept], *, as_json: bool) -> None:
    if as_json:
        for one in rest:
            click.echo(json.dumps({"key": one.key, **asdict(one)}, default=str))
        return
    from engine.wording import size_of

    table = Table()
    for title in ("key", "kind", "built of", "used"):
        table.add_column(title)
    table.add_column("size", justify="right")
    for one in rest:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used_at))
        table.add_row(one.key, one.kind, one.built_of, used, size_of(one.num_bytes))
    if rest:
        print_table(table)
    whole = size_of(sum(one.num_bytes for one in rest))
    click.echo(f"{whole} in {len(rest)} director{'y' if len(rest) == 1 else 'ies'}")
