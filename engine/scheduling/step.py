"""What one step computes of the requests: chunks of prompts, and draws from the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.sampling.draws import BeamDraw, Draw, ScoreDraw
from engine.scheduling.sequence import Request, Sequence, row_of
from engine.slots.batch import PrefillChunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a prompt."""

    sequence: Sequence
    start: int
    end: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the next token is to be drawn behind it."""
        sequence = self.sequence
        return self.end == sequence.num_prompt and not sequence.request.is_score_only

    @property
    def ends_target(self) -> bool:
        """Whether nothing is left of a request that only scores."""
        sequence = self.sequence
        return sequence.request.is_score_only and self.end == len(sequence.tokens) - 1

    @property
    def first_scored(self) -> int:
        """The first of its positions whose logits are wanted: those that predict a scored token."""
        score_from = self.sequence.request.score_from
        wanted = self.end if score_from is None else max(self.start, score_from - 1)
        return min(wanted, self.end - self.ends_prompt)

    @property
    def num_logits(self) -> int:
        """Its last positions whose logits are wanted."""
        return self.end - self.first_scored

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The given tokens that its logits predict."""
        if self.sequence.request.score_from is None:
            return ()
        return tuple(self.sequence.tokens[self.first_scored + 1 : self.end + 1])

    def at_row(self) -> PrefillChunk:
        """Return it as the model runner takes it; its row is that of now."""
        sequence = self.sequence
        ids = tuple(sequence.tokens[self.start : self.end])
        return PrefillChunk(row_of(sequence), ids, self.num_logits, sequence.request.source_row)


@dataclass(slots=True)
class PrefillPlan:
    """Rows are read from it only when it is complete: giving it a piece may still move rows."""

    encoded: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    is_empty: bool = True
    num_tokens: int = 0  # without single ones, which are decoded


class DrawPlan(NamedTuple):
    """What is chosen and scored behind the logits of a step, and for whom."""

    draws: tuple[Draw | BeamDraw, ...]
    drawing: list[Sequence | Request]  # one a draw; a beam search draws as a request
    scores: tuple[ScoreDraw, ...]
    scoring: list[Chunk]  # one a score
    num_top: int  # of the largest logits, as many as all of them look at
    aligned: dict[Sequence, int]  # those that want to know its attention, and their logits row


def plan_draws(decoding: list[Sequence], chunks: list[Chunk]) -> DrawPlan:
    """Return the draws of a step whose logits are those of `decoding`, then those of `chunks`."""
    rows = {sequence: row for row, sequence in enumerate(decoding)}
    scores, scoring = [], []
    row = len(decoding)
    for chunk in chunks:
        if chunk.scored_ids:
            num_top = chunk.sequence.request.source.params.prompt_logprobs or 0
            scores.append(ScoreDraw(row, chunk.scored_ids, num_top))
            scoring.append(chunk)
        row += chunk.num_logits
        if chunk.ends_prompt:
            rows[chunk.sequence] = row - 1
    draws, drawing = _draws(rows)
    members = [*rows, *(chunk.sequence for chunk in scoring)]
    wanted = max((sequence.request.num_top for sequence in members), default=1)
    num_top = 1 << (wanted - 1).bit_length()  # few sizes, each bound once
    aligned = {s: row for s, row in rows.items() if s.request.source.params.alignment}
    return DrawPlan(tuple(draws), drawing, tuple(scores), scoring, num_top, aligned)


def _draws(
    rows: dict[Sequence, int],
) -> tuple[list[Draw | BeamDraw], list[Sequence | Request]]:
    draws: list[Draw | BeamDraw] = []
    drawing: list[Sequence | Request] = []
    searches: dict[Request, None] = {}
    for sequence, row in rows.items():
        request = sequence.request
        if request.search is not None:
            searches[request] = None
            continue
        # The first tokens of a group are all drawn behind the prompt that its leader computed.
        group = request.sequences if request.first_token is None else [sequence]
        draws += [_draw(member, row) for member in group]
        drawing += group
    for request in searches:
        assert request.search is not None
        beams = tuple(_draw(beam, rows[beam]) for beam in request.beams)
        draws.append(BeamDraw(beams, request.search.scores, request.search.num_candidates))
        drawing.append(request)
    return draws, drawing


def _draw(sequence: Sequence, row: int) -> Draw:
    source = sequence.request.source
    is_short = sequence.num_generated < source.params.min_new_tokens
    return Draw(
        row,
        source.params,
        source.seed,
        sequence.index,
        len(sequence.tokens),
        sequence.request.never_before if is_short else (),
        sequence.tokens,
        sequence.num_prompt,
        sequence.matcher,
    )
