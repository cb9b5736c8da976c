"""The command that shows all of it on one machine."""

from __future__ import annotations

from pathlib import Path

import click

from server.cli.options import any_path, examples


@click.command(
    short_help="Show all of it on this machine, in a few minutes.",
    epilog=examples("tokenweir demo", "tokenweir demo --keep-serving"),
)
@click.option(
    "--out", type=any_path, default=Path("demo"), show_default=True, help="Directory of all files."
)
@click.option(
    "--keep-serving",
    is_flag=True,
    help="Serve until Ctrl-C; train and export only if there is no package yet.",
)
@click.option("--port", type=click.IntRange(0, 65535), help="[default: 50051 with --keep-serving]")
def demo(out: Path, keep_serving: bool, port: int | None) -> None:
    """Train a model on dates, export it with its certificate, serve it with two workers, ask it a
    dozen dates, load-test it, and stop everything. Takes a few minutes.
    """
    raise NotImplementedError
