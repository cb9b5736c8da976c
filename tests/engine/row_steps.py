"""Steps of one kind, run on the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling.logits import Floats
from engine.slots.batch import PrefillChunk, ScheduledBatch
from engine.slots.runner import SlotModelRunner


def prefill(runner: SlotModelRunner, row: int, token_ids: Sequence[int]) -> Floats:
    """Append tokens to one row; return the logits behind the last one, [1, V]."""
    chunk = PrefillChunk(row, tuple(token_ids), num_logits=1, source_row=row)
    return runner.run(ScheduledBatch(chunks=(chunk,))).all_logits


def decode(runner: SlotModelRunner, token_ids: Sequence[int]) -> Floats:
    """Append a token to each of the first B rows; return the logits behind it, [B, V]."""
    return runner.run(ScheduledBatch(decode_ids=tuple(token_ids))).all_logits
