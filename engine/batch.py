"""What one step of the engine computes, as the scheduler hands it to the model runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.request import SamplingParams


class RowOp(NamedTuple):
    """A change of the cache's rows; an empty row holds zeros and has length 0.

    `clear` empties `target`; `move` takes `source` to the empty row `target` and leaves `source`
    empty; `copy` leaves it as it is; `swap` exchanges the two.
    """

    kind: Literal["clear", "move", "copy", "swap"]
    source: int
    target: int


class Encode(NamedTuple):
    """A source sentence to be encoded into its row."""

    row: int
    source_ids: tuple[int, ...]


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt."""

    row: int
    token_ids: tuple[int, ...]
    wants_logits: bool  # it is the prompt's last


class Draw(NamedTuple):
    """A token to be chosen."""

    logits_row: int  # several sequences of a request draw their first token from the same row
    params: SamplingParams
    seed: int
    sequence_index: int  # in its request
    position: int  # of the token, counted from the start of the sequence
    banned: tuple[int, ...]  # tokens that may not be chosen


@dataclass(frozen=True)
class ScheduledBatch:
    """One step. The parts are run in the order of the fields.

    Logits come in another order: a row for each decoding one, then one for each chunk that wants
    them.
    """

    row_ops: tuple[RowOp, ...]
    encodes: tuple[Encode, ...]
    chunks: tuple[PrefillChunk, ...]
    decode_ids: tuple[int, ...]  # the token of row 0, 1, ...
    draws: tuple[Draw, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no model is run."""
        return not (self.encodes or self.decode_ids or self.chunks)
