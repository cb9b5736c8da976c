"""The model's own log-probabilities of tokens: no penalty, temperature or ban changes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.batch import Draw, Sampled, StepLogits
from engine.request import PositionLogprobs, TokenLogprob

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

    def logprob(self, row: int, token_id: int) -> float:
        """Return the log-probability of any token."""
        difference = self.logits.logits[row, token_id] - self.logits.top_logits[row, 0]
        return float(difference) + self._best_logprobs[row]

    def logprobs(self, rows: NDArray[np.integer], token_ids: NDArray[np.integer]) -> Doubles:
        """Return the log-probabilities of tokens, each in its row; the bits are those of one."""
        top = self.logits
        differences = top.logits[rows, token_ids] - top.top_logits[rows, 0]
        found: Doubles = differences.astype(np.float64) + top.top_logprobs[rows, 0]
        return found

    def are_outside(self, token_ids: Iterable[int], row: int, num_columns: int) -> bool:
        """Say whether none of the tokens is among the likeliest."""
        if num_columns == 1:
            return self._best_ids[row] not in token_ids
        return set(self.logits.top_ids[row, :num_columns].tolist()).isdisjoint(token_ids)

    def sampled(self, draw: Draw, token_id: int) -> Sampled:
        """Return a token that was chosen."""
        return self._sampled(draw, token_id, self.logprob(draw.logits_row, token_id))

    def sampled_column(self, draw: Draw, column: int) -> Sampled:
        """Return a token that was chosen, by its place among the likeliest."""
        row = draw.logits_row
        if column == 0:
            return self._sampled(draw, self._best_ids[row], self._best_logprobs[row])
        token_id = int(self.logits.top_ids[row, column])
        return self._sampled(draw, token_id, float(self.logits.top_logprobs[row, column]))

    def position(
        self, row: int, token_id: int, num_top: int, logprob: float | None = None
    ) -> PositionLogprobs:
        """Return the log-probabilities of a token and of the `num_top` likeliest ones."""
        if logprob is None:
            logprob = self.logprob(row, token_id)
        chosen = TokenLogprob(token_id, logprob, self._rank(row, token_id))
        return PositionLogprobs(chosen, self._top(row, num_top))

    def _sampled(self, draw: Draw, token_id: int, logprob: float) -> Sampled:
        num_top = draw.params.logprobs
        if num_top is None:
            return Sampled(token_id, logprob)
        position = self.position(draw.logits_row, token_id, num_top, logprob)
        return Sampled(token_id, logprob, position)

    def _rank(self, row: int, token_id: int) -> int:
        """Return 1 and how many logits are larger."""
        logit = self.logits.logits[row, token_id]
        top = self.logits.top_logits[row]
        others = top if logit >= top[-1] else self.logits.logits[row]
        return 1 + int(np.count_nonzero(others > logit))

    def _top(self, row: int, num_top: int) -> tuple[TokenLogprob, ...]:
        ids = self.logits.top_ids[row, :num_top].tolist()
        logits = self.logits.top_logits[row, :num_top]
        logprobs = self.logits.top_logprobs[row, :num_top].tolist()
        ranks = (1 + logits[::-1].searchsorted(logits, side="right")).tolist()
        ranks = [len(ids) + 2 - rank for rank in ranks]
        return tuple(map(TokenLogprob, ids, logprobs, ranks))
