"""Tables of tokens: what each looks at in the source, and how likely each was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text
from tokenweir import GeneratedSequence, PositionLogprobs


def alignment_table(sequence: GeneratedSequence, source_pieces: Sequence[bytes]) -> Table:
    """Return each generated token with the source token of its largest attention, one a row.

    The sequence has the attention and, for the names of its tokens, log-probabilities.
    """
    table = _table("Attention to the source", "token", "source token")
    table.add_column("at", justify="right")
    table.add_column("share", justify="right")
    for position, attention in zip(sequence.logprobs, sequence.alignment, strict=True):
        place = max(range(len(attention)), key=attention.__getitem__)
        source = quoted(source_pieces[place]) if place < len(source_pieces) else "?"
        table.add_row(
            Text(quoted(position.chosen.piece)),
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
        likeliest = ", ".join(f"{quoted(one.piece)} {one.logprob:.4f}" for one in position.top)
        piece = Text(quoted(chosen.piece))
        table.add_row(piece, f"{chosen.logprob:.4f}", str(chosen.rank), Text(likeliest))
    return table


def quoted(piece: bytes) -> str:
    """Return a piece so that spaces, line ends and bytes of unfinished characters are seen."""
    return repr(piece.decode(errors="backslashreplace"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name)
    return table
