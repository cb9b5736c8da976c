"""The tokens and rows of one step, as the model runner takes them."""

from __future__ import annotations

from typing import Literal, NamedTuple


class RowOp(NamedTuple):
    """A change of the cache's rows; an empty row has length 0.

    `cut` shortens `target`, and a little behind it may stay in memory; `clear` puts zeros there,
    for a row that may hold NaN. `move` takes `origin` to the empty row `target` and clears
    `origin`; `copy` leaves it as it is, and what was in `target` is gone; `swap` exchanges the two.
    `cut_source`, `clear_source` and `copy_source` do the same with rows of the sources.
    """

    kind: Literal[
        "cut", "clear", "move", "copy", "swap", "cut_source", "clear_source", "copy_source"
    ]
    origin: int
    target: int
    start: int = 0  # copy: positions before it are equal in both already; cut, clear: they stay
    stop: int | None = None  # copy: the first position that is not wanted; None: all are


class RowLengths(NamedTuple):
    """How many tokens each row holds."""

    rows: tuple[int, ...]
    sources: tuple[int, ...]


class Encode(NamedTuple):
    """A source sentence to be encoded into a row of the sources."""

    row: int
    source_ids: tuple[int, ...]


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt."""

    row: int
    token_ids: tuple[int, ...]
    num_logits: int  # its last positions whose logits are wanted
    source_row: int = 0  # encoder-decoder: of the sources


class ScheduledBatch(NamedTuple):
    """One step. The parts are run in the order of the fields.

    Logits come in another order: a row for each decoding one, then those that each chunk wants.
    """

    row_ops: tuple[RowOp, ...] = ()
    encodes: tuple[Encode, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decode_ids: tuple[int, ...] = ()  # the token of row 0, 1, ...
    decode_sources: tuple[int, ...] = ()  # encoder-decoder: the source of row 0, 1, ...
    num_top: int = 1  # how many of the largest logits are looked at
    aligned: tuple[int, ...] = ()  # rows of logits whose attention to the source is wanted, rising
    # See Parts; the model runner of a device takes, for each of its rows, that of the step before
    # which gives its token.
    future_tokens: tuple[int, ...] = ()
