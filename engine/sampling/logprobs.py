"""The model's own log-probabilities of tokens: no penalty, temperature or ban changes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.requests.events import PositionLogprobs, TokenLogprob
from engine.sampling.draws import Draw, Sampled
from engine.sampling.logits import StepLogits

Doubles = NDArray[np.float64]


class ModelLogprobs:
    """Looks up the logits of one step."""

    def __init__(self, logits: StepLogits) -> None:
        self.logits = logits
        self.vocab_size: int = logits.logits.shape[1]
        self._best_ids: list[int] = logits.top_ids[:, 0].tolist()
        self._best_logprobs: list[float] = logits.top_logprobs[:, 0].tolist()
        is_finite = np.isfinite(logits.top_logits[:, 0]) & np.isfinite(logits.top_logprobs[:, 0])
        self.is_finite: list[bool] = is_finite.tolist()  # NaN anywhere in a row reaches both

    def likeliest(self, row: int) -> Sampled:
        """Return the likeliest token, of which no more is to be told."""
        return Sampled(self._best_ids[row], self._best_logprobs[row])

    def logprob(self, row: int, token_id: int) -> float:
        """Return the log-probability of any token."""
        difference = self.logits.logits[row][token_id] - self.logits.top_logits[row, 0]
        return float(difference) + self._best_logprobs[row]

    def logprobs(self, rows: NDArray[np.integer], columns: NDArray[np.integer]) -> Doubles:
        """Return the log-probabilities of tokens by row and place among the likeliest there.

        The bits are those that `logprob` gives.
        """
        top = self.logits
        differences = top.top_logits[rows, columns] - top.top_logits[rows, 0]
        found: Doubles = differences.astype(np.float64) + top.top_logprobs[rows, 0]
        return found

    def are_outside(self, token_ids: Iterable[int], row: int, num_columns: int) -> bool:
        """Say whether none of the tokens is among the likeliest."""
        if num_columns == 1:
            return self._best_ids[row] not in token_ids
        return set(self.logits.top_ids[row, :num_columns].tolist()).isdisjoint(token_ids)

    def sampled(self, draw: Draw, token_id: int) -> Sampled:
        """Return a token that was chosen from the whole row."""
        return self._sampled(draw, token_id, self.logprob(draw.logits_row, token_id))

    def sampled_column(self, draw: Draw, column: int) -> Sampled:
        """Return a token that was chosen, by its place among the likeliest."""
        row = draw.logits_row
        if column == 0:
            return self._sampled(draw, self._best_ids[row], self._best_logprobs[row], column)
        token_id = int(self.logits.top_ids[row, column])
        return self._sampled(draw, token_id, float(self.logits.top_logprobs[row, column]), column)

    def position(self, row: int, token_id: int, num_top: int) -> PositionLogprobs:
        """Return the log-probabilities of any token and of the `num_top` likeliest ones."""
        logit = self.logits.logits[row][token_id]
        return self._position(row, token_id, num_top, self.logprob(row, token_id), logit)

    def _sampled(
        self, draw: Draw, token_id: int, logprob: float, column: int | None = None
    ) -> Sampled:
        row, num_top = draw.logits_row, draw.params.logprobs
        if num_top is None:
            return Sampled(token_id, logprob)
        top, whole = self.logits.top_logits, self.logits.logits
        logit = whole[row][token_id] if column is None else top[row, column]
        return Sampled(token_id, logprob, self._position(row, token_id, num_top, logprob, logit))

    def _position(
        self, row: int, token_id: int, num_top: int, logprob: float, logit: np.float32
    ) -> PositionLogprobs:
        top = self.logits.top_logits[row]
        others = top if logit >= top[-1] else self.logits.logits[row]
        chosen = TokenLogprob(token_id, logprob, 1 + int(np.count_nonzero(others > logit)))
        ids = self.logits.top_ids[row, :num_top].tolist()
        logits, logprobs = top[:num_top], self.logits.top_logprobs[row, :num_top].tolist()
        ranks = (1 + logits[::-1].searchsorted(logits, side="right")).tolist()
        ranks = [len(ids) + 2 - rank for rank in ranks]
        return PositionLogprobs(chosen, tuple(map(TokenLogprob, ids, logprobs, ranks)))
