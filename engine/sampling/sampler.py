"""Chooses the next tokens of all sequences of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.requests.events import PositionLogprobs
from engine.requests.request import SamplingParams
from engine.sampling import beam_candidates
from engine.sampling.beam_candidates import best_candidates
from engine.sampling.draws import BeamExpansion, Choice, Draw, Sampled, TokensToScore
from engine.sampling.logit_controls import adjusted, is_controlled, is_free
from engine.sampling.logits import Floats, StepLogits
from engine.sampling.logprobs import ModelLogprobs
from engine.sampling.plain import (
    PlainChoices,
    SampledColumns,
    SamplingBatch,
    Scope,
    needs_row_sum,
    num_columns,
)
from engine.sampling.random_stream import RandomStream
from engine.sampling.top_k import largest
from engine.sampling.truncation import (
    Ids,
    Truncations,
    pick,
    tempered,
    truncate,
    truncated_weights,
)

Doubles = NDArray[np.float64]


def num_top(params: SamplingParams) -> int:
    """Return how many of a row's likeliest tokens the sampler wants of a request's rows.

    The number may exceed the vocabulary. More are never looked at, so that the result of a request
    does not depend on what the others of the step want.
    """
    return max(1, params.logprobs or 0, params.prompt_logprobs or 0, num_columns(params) or 0)


def reads_rows(draw: Draw | BeamExpansion) -> bool:
    """Say whether a draw may look at its whole row of logits, beside the likeliest tokens."""
    if isinstance(draw, BeamExpansion):
        return beam_candidates.reads_rows(draw)
    if draw.banned or not is_free(draw):
        return True
    params = draw.params
    if params.strategy == "greedy":
        return False
    return params.top_k == 0 or num_columns(params) is None


def _usable_columns(model: ModelLogprobs, draw: Draw) -> int | None:
    """Return from how many of its row's likeliest tokens a draw can choose; None: from all."""
    width = num_columns(draw.params)
    if width is None or not is_free(draw):
        return None
    width = min(width, model.vocab_size)
    if draw.banned:
        is_mass_needed = draw.params.top_k == 0 and draw.params.top_p < 1
        if is_mass_needed or not model.are_outside(draw.banned, draw.logits_row, width):
            return None
    return width


def _takes_likeliest(draw: Draw) -> bool:
    """Say whether a draw is sure to take the likeliest token, and nothing else is asked of it."""
    is_greedy = draw.params.strategy == "greedy" and draw.params.logprobs is None
    return is_greedy and not draw.banned and is_free(draw)


def drawn_columns(
    top_logits: Floats, rows: Ids, totals: Doubles, uniform: Doubles, how: Truncations
) -> tuple[Ids, NDArray[np.bool_]]:
    """Return which of the likeliest tokens of each row is drawn, and whether its columns were cut.

    If they were not, tokens behind them may be drawn, too. `totals` are the sums of the weights of
    all tokens, NaN where only the columns count.
    """
    scores = tempered(top_logits[rows, : how.num_columns.max()], how.temperature)  # [n, k]
    weights, is_cut = truncated_weights(scores, totals, how)
    # Tokens whose probability rounds to 0 take no room in the sum and so are never drawn.
    cumulative = weights.cumsum(axis=1, dtype=np.float64)
    columns: Ids = (cumulative <= (uniform * cumulative[:, -1])[:, None]).sum(axis=1)
    return columns, is_cut


def drawn_from_row(
    row: Floats, params: SamplingParams, uniform: float, out: Floats | None = None
) -> int:
    """Return which token of a row is drawn, of all that may be, in the order of ids."""
    scores, kept = truncate(tempered(row, params.temperature, out), params)
    # Tokens whose probability rounds to 0 are never drawn.
    chosen = pick(np.exp(scores, out=scores), uniform)
    return chosen if kept is None else int(kept[chosen])


class Sampler:
    """Greedy choice, random sampling and the candidates of beam search.

    The choice for a row depends on that row and its draw only, to the bit. Rows whose likeliest
    tokens are enough are worked on together, every other row alone.
    """

    def __init__(self) -> None:
        self._stream = RandomStream()
        self._row = np.empty(0, np.float32)

    def sample(self, logits: StepLogits, draws: Sequence[Draw | BeamExpansion]) -> list[Choice]:
        """Choose a token for each draw, or the candidates of each BeamExpansion, best first.

        None: no token can be chosen, for a row holds NaN or infinity (its model has failed), or a
        constraint cannot be followed any further.
        """
        model = ModelLogprobs(logits)
        choices: list[Choice] = [None] * len(draws)
        from_rows: list[tuple[int, Draw]] = []
        from_columns: list[tuple[int, Draw, int]] = []
        searches: list[tuple[int, BeamExpansion]] = []
        for i, draw in enumerate(draws):
            if isinstance(draw, BeamExpansion):
                if all(model.is_finite[beam.logits_row] for beam in draw.beams):
                    searches.append((i, draw))
            elif not model.is_finite[draw.logits_row]:
                continue
            elif _takes_likeliest(draw):
                choices[i] = model.likeliest(draw.logits_row)
            else:
                width = _usable_columns(model, draw)
                if width is None:
                    from_rows.append((i, draw))
                elif draw.params.strategy == "greedy":
                    choices[i] = model.sampled_column(draw, 0)
                else:
                    from_columns.append((i, draw, width))
        if from_rows or from_columns:  # the whole rows that are sure to be read
            read = [draw for _, draw in from_rows]
            read += [draw for _, draw, _ in from_columns if needs_row_sum(draw.params)]
            logits.fetch(draw.logits_row for draw in read)
        if from_columns:
            from_rows += self._choose_from_columns(model, from_columns, choices)
        if from_rows:
            logits.fetch(draw.logits_row for _, draw in from_rows)
            for i, draw in from_rows:
                choices[i] = self._choose_from_row(model, draw)
        if searches:
            candidates = best_candidates(model, [draw for _, draw in searches])
            for (i, _), found in zip(searches, candidates, strict=True):
                choices[i] = found or None
        return choices

    def choose(self, logits: StepLogits, plain: SamplingBatch) -> PlainChoices:
        """Choose a token for each plain draw: what `sample` would choose for them."""
        best_logprobs = logits.top_logprobs[plain.rows, 0]
        is_finite = np.isfinite(logits.top_logits[plain.rows, 0]) & np.isfinite(best_logprobs)
        failed = () if is_finite.all() else (~is_finite).nonzero()[0].tolist()
        best_ids = logits.top_ids[plain.rows, 0]
        found = PlainChoices(best_ids.tolist(), best_logprobs.tolist(), failed)
        if (sampled := plain.sampled) is not None:
            if (drawn := logits.drawn) is None:
                self._choose_sampled(logits, plain, sampled, found)
            else:
                rows = plain.rows_of(sampled.which)
                found.put(sampled.which, drawn.ids[rows], drawn.logprobs[rows])
        return found

    def _choose_sampled(
        self, logits: StepLogits, plain: SamplingBatch, sampled: SampledColumns, found: PlainChoices
    ) -> None:
        """Put what is drawn into `found`, in the place of the likeliest tokens."""
        rows = plain.rows_of(sampled.which)
        totals, params = np.full(len(rows), np.nan), sampled.params
        logits.fetch(int(rows[i]) for i in sampled.needs_total if needs_row_sum(params[i]))
        uniform = np.array(self._stream.uniforms(sampled.draws, plain.positions))
        with np.errstate(invalid="ignore", over="ignore"):  # in rows that are not finite
            for i in sampled.needs_total:
                totals[i] = self._total(logits, int(rows[i]), params[i])
            columns, is_cut = drawn_columns(logits.top_logits, rows, totals, uniform, sampled.how)
        np.minimum(columns, sampled.how.num_columns - 1, out=columns)  # in such rows: any
        ids, logprobs = logits.top_ids[rows, columns], logits.top_logprobs[rows, columns]
        found.put(sampled.which, ids, logprobs)
        is_open = ~is_cut & (sampled.scopes == Scope.GO_ON)
        if is_open.any():
            which = is_open.nonzero()[0]
            self._choose_behind_columns(logits, plain, sampled, which, uniform[which], found)

    def _choose_behind_columns(
        self,
        logits: StepLogits,
        plain: SamplingBatch,
        sampled: SampledColumns,
        which: NDArray[np.intp],
        uniform: Doubles,
        found: PlainChoices,
    ) -> None:
        """Choose from whole rows: what may be drawn goes on behind the columns."""
        places = sampled.which[which]
        rows = plain.rows_of(places)
        logits.fetch(rows.tolist())
        model = ModelLogprobs(logits)
        for i, place, row, at in zip(
            which.tolist(), places.tolist(), rows.tolist(), uniform.tolist(), strict=True
        ):
            if place in found.failed:
                continue
            whole = logits.logits[row]
            chosen = drawn_from_row(whole, sampled.params[i], at, self._scratch(whole))
            found.token_ids[place] = chosen
            found.logprobs[place] = model.logprob(row, chosen)

    def score(self, logits: StepLogits, draw: TokensToScore) -> tuple[PositionLogprobs, ...] | None:
        """Return the log-probabilities of given tokens; None if a row is not finite."""
        model = ModelLogprobs(logits)
        rows = range(draw.logits_row, draw.logits_row + len(draw.token_ids))
        if not all(model.is_finite[row] for row in rows):
            return None
        logits.fetch(rows)
        return tuple(
            model.position(row, token_id, draw.num_top)
            for row, token_id in zip(rows, draw.token_ids, strict=True)
        )

    def _choose_from_columns(
        self, model: ModelLogprobs, found: list[tuple[int, Draw, int]], choices: list[Choice]
    ) -> list[tuple[int, Draw]]:
        """Choose where the likeliest tokens are enough; return the others."""
        others: list[tuple[int, Draw]] = []
        draws = [draw for _, draw, _ in found]
        how = Truncations.of([draw.params for draw in draws], [width for _, _, width in found])
        rows = np.array([draw.logits_row for draw in draws])
        totals = np.array([self._total(model.logits, d.logits_row, d.params) for d in draws])
        uniform = np.array([self._uniform(draw) for draw in draws])
        columns, is_cut = drawn_columns(model.logits.top_logits, rows, totals, uniform, how)
        for (i, draw, width), column, cut in zip(
            found, columns.tolist(), is_cut.tolist(), strict=True
        ):
            if cut or draw.params.top_k or width == model.vocab_size:
                choices[i] = model.sampled_column(draw, column)
            else:  # tokens behind the columns may be drawn
                others.append((i, draw))
        return others

    def _choose_from_row(self, model: ModelLogprobs, draw: Draw) -> Sampled | None:
        if draw.forced is not None:
            return model.sampled(draw, draw.forced)
        row = model.logits.logits[draw.logits_row]
        if draw.banned or draw.matcher is not None or is_controlled(draw.params):
            row = adjusted(row, draw, self._scratch(row))
            if row.max() == -np.inf:
                return None
        if draw.params.strategy == "greedy":
            return model.sampled(draw, int(row.argmax()))
        ids = None
        if 0 < draw.params.top_k < len(row):  # before the temperature: that keeps the order
            ids = largest(row, draw.params.top_k, model.logits.top_ids[draw.logits_row])
            row = row[ids]
        chosen = drawn_from_row(row, draw.params, self._uniform(draw), self._scratch(row))
        return model.sampled(draw, chosen if ids is None else int(ids[chosen]))

    def _uniform(self, draw: Draw) -> float:
        return self._stream.uniform(draw.seed, draw.sequence_index, draw.position)

    def _total(self, logits: StepLogits, row: int, params: SamplingParams) -> float:
        """Return what the weights of all tokens of a row add up to; NaN if it is not needed."""
        if params.top_k or params.top_p == 1:
            return math.nan
        if not needs_row_sum(params):
            return math.exp(-float(logits.top_logprobs[row, 0]))
        whole = logits.logits[row]
        scores = tempered(whole, params.temperature, self._scratch(whole))
        return float(np.exp(scores, out=scores).sum(dtype=np.float64))

    def _scratch(self, row: Floats) -> Floats:
        """Return a row to work in: fresh memory for each would cost more than the work."""
        if len(self._row) < len(row):
            self._row = np.empty(len(row), np.float32)
        return self._row[: len(row)]
