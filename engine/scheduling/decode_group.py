"""The sequences that decode in a step, by how their next tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from engine.sampling.plain import Rows, SampledColumns, SamplingBatch
from engine.scheduling.sequence import Sequence


class DecodeGroup:
    """Sequences in the order in which they decode; it stands as long as the same ones do.

    If some pause in every second step, this group and that of the others take turns. All of them
    may be in `num_steps_left` more steps; the scheduler counts one off at each.
    """

    def __init__(self, sequences: Many[Sequence], vocab_size: int) -> None:
        self.sequences = tuple(sequences)
        rows = [row for row, one in enumerate(self.sequences) if one.request.draws_plainly]
        self.plain = tuple([self.sequences[row] for row in rows])
        self.begins = any(one.num_generated == 0 for one in self.plain)
        is_all = len(rows) == len(self.sequences)
        self._rows: Rows = slice(len(rows)) if is_all else np.array(rows, np.intp)
        self.others = {} if is_all else self._others()  # their rows
        self.num_top = max([one.request.num_top for one in self.sequences], default=1)
        self.num_steps_left = 0
        self._drawn = [one for one in self.plain if one.draws is not None]  # not greedy
        self._sampled = self._sampled_columns(vocab_size) if self._drawn else None

    def number_sequences(self) -> None:
        """Begin steps of this group behind those of another."""
        for i, sequence in enumerate(self.plain):
            sequence.plain_index = i
        self.num_steps_left = min([one.num_steps_left for one in self.sequences], default=0)

    def sampling_batch(self) -> SamplingBatch:
        """Return the draws of the plain ones behind what they have computed."""
        positions = [one.num_computed for one in self._drawn]
        return SamplingBatch(self._rows, self._sampled, positions)

    def _others(self) -> dict[Sequence, int]:
        return {one: row for row, one in enumerate(self.sequences) if not one.request.draws_plainly}

    def _sampled_columns(self, vocab_size: int) -> SampledColumns:
        which = [i for i, one in enumerate(self.plain) if one.draws is not None]
        return SampledColumns.of(
            which,
            [one.request.asked.params for one in self._drawn],
            [one.draws for one in self._drawn if one.draws is not None],
            vocab_size,
        )
