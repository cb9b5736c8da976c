"""One step as a value: the tokens that it computes, and the draws behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.requests.events import PositionLogprobs
from engine.sampling.draws import BeamExpansion, Choice, Draw, TokensToScore
from engine.sampling.logits import Floats
from engine.sampling.plain import PlainChoices, SamplingBatch
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.sequence import Request, Sequence

SlotMapping = object  # a step's keys and values, in the terms of one KVCache and its runner


class StepResult(NamedTuple):
    """The choices and scores of a step, in memory of its own that the next step leaves alone.

    A choice or score of None: there is none, and its request fails.
    """

    plain: PlainChoices = PlainChoices()  # those of Step.sampling_batch
    choices: tuple[Choice, ...] = ()  # one for each of Step.draws
    scores: tuple[tuple[PositionLogprobs, ...] | None, ...] = ()  # one for each of Step.scores
    alignment: Floats | None = None  # [Parts.aligned, longest source], if any
    num_padding: int = 0  # tokens computed for nobody
    model_seconds: float = 0.0
    sampling_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a sequence, of its prompt as a rule."""

    sequence: Sequence
    start: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that it computes."""
        return tuple(self.sequence.tokens[self.start : self.end])

    @property
    def is_drawn_behind(self) -> bool:
        """Whether the next token is to be drawn behind it."""
        sequence = self.sequence
        return self.end == len(sequence.tokens) and not sequence.request.is_score_only

    @property
    def ends_target(self) -> bool:
        """Whether nothing is left of a request that only scores."""
        sequence = self.sequence
        return sequence.request.is_score_only and self.end == len(sequence.tokens) - 1

    @property
    def scored(self) -> range:
        """Its positions whose logits predict a given token that is scored."""
        score_from = self.sequence.request.score_from
        if score_from is None:
            return range(0)
        return range(max(self.start, score_from - 1), min(self.end, self.sequence.num_prompt - 1))

    @property
    def num_logits(self) -> int:
        """Its last positions whose logits are wanted."""
        return self.end - self.scored.start if self.scored else int(self.is_drawn_behind)

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The given tokens that its first logits predict."""
        return tuple(self.sequence.tokens[position + 1] for position in self.scored)


class Parts(NamedTuple):
    """The tokens that a step computes, by sequence.

    Logits come for each decoding sequence, then for those positions that each chunk wants.
    """

    encoding: tuple[Request, ...]  # their sources
    chunks: tuple[Chunk, ...]
    decoding: tuple[Sequence, ...]
    decode_ids: tuple[int, ...]  # the token that each of them computes, if it is known
    num_top: int  # how many of the largest logits the draws look at
    aligned: tuple[int, ...]  # which logits' attention to the source is wanted, rising
    # The plain draw of the step before that gives each sequence's token, -1: it is known; (): all
    # are.
    future_tokens: tuple[int, ...] = ()


class Step(NamedTuple):
    """All of one step, from its schedule until its result is taken in; several may be under way.

    A sequence whose next token is being drawn has nothing to compute until the step was taken in,
    but for plain draws of a runner whose steps overlap.
    """

    number: int
    started: float  # on the scheduler's clock
    num_read: int  # source and prompt tokens
    parts: Parts
    slot_mapping: SlotMapping
    sampling_batch: SamplingBatch
    plain: tuple[Sequence, ...]  # one a plain draw
    begins: bool  # some of these may draw their first token
    draws: tuple[Draw | BeamExpansion, ...]
    drawing: tuple[Sequence | Request, ...]  # one a draw; a beam search draws as a request
    scores: tuple[TokensToScore, ...]
    scoring: tuple[Chunk, ...]  # one a score
    aligned: tuple[Sequence, ...]  # one for each of Parts.aligned

    @property
    def may_be_followed(self) -> bool:
        """Whether those that draw plainly may go on before this one is taken in.

        The others then are in every second step only, so they must not be more.
        """
        return 2 * len(self.plain) >= len(self.parts.decoding)


class DrawPlan(NamedTuple):
    """The draws and scores of a step beside plain draws, and the owner of each."""

    draws: list[Draw | BeamExpansion]
    drawing: list[Sequence | Request]
    scores: list[TokensToScore]
    scoring: list[Chunk]
    num_top: int
    aligned: dict[Sequence, int]  # those that want to know its attention, and their logits


def plan_draws(group: DecodeGroup, chunks: list[Chunk]) -> DrawPlan:
    """Return the draws of a step whose logits are those of the group, then those of `chunks`."""
    if not chunks and not group.others:
        return DrawPlan([], [], [], [], _size_of(group.num_top), {})
    logits = dict(group.others)
    scores, scoring = [], []
    first = len(group.sequences)
    for chunk in chunks:
        scored_ids = chunk.scored_ids
        if scored_ids:
            num_top = chunk.sequence.request.asked.params.prompt_logprobs or 0
            scores.append(TokensToScore(first, scored_ids, num_top))
            scoring.append(chunk)
        first += chunk.num_logits
        if chunk.is_drawn_behind:
            logits[chunk.sequence] = first - 1
    draws, drawing = _draws(logits)
    members = [*logits, *[chunk.sequence for chunk in scoring]]
    wanted = max([group.num_top, *[sequence.request.num_top for sequence in members]])
    aligned = {s: i for s, i in logits.items() if s.request.is_aligned}
    return DrawPlan(draws, drawing, scores, scoring, _size_of(wanted), aligned)


def _size_of(num_top: int) -> int:
    """Return one of few sizes, each of which is bound once."""
    return 1 << (num_top - 1).bit_length()


def _draws(
    logits: dict[Sequence, int],
) -> tuple[list[Draw | BeamExpansion], list[Sequence | Request]]:
    draws: list[Draw | BeamExpansion] = []
    drawing: list[Sequence | Request] = []
    searches: dict[Request, None] = {}
    for sequence, i in logits.items():
        request = sequence.request
        if request.search is not None:
            searches[request] = None
            continue
        if request.first_token is not None:
            draws.append(_draw(sequence, i))
            drawing.append(sequence)
            continue
        # The first tokens of a group are all drawn behind the prompt that its leader computed.
        draws += [_draw(member, i) for member in request.sequences]
        drawing += request.sequences
    for request in searches:
        assert request.search is not None
        beams = tuple(_draw(beam, logits[beam]) for beam in request.beams)
        draws.append(BeamExpansion(beams, request.search.scores, request.search.num_candidates))
        drawing.append(request)
    return draws, drawing


def _draw(sequence: Sequence, logits_row: int) -> Draw:
    asked, rules = sequence.request.asked, sequence.request.token_rules
    num_generated = sequence.num_generated
    return Draw(
        logits_row,
        asked.params,
        asked.seed,
        sequence.index,
        len(sequence.tokens),
        () if rules is None else rules.banned(sequence.tokens, num_generated),
        sequence.tokens,
        sequence.num_prompt,
        sequence.matcher,
        None if rules is None else rules.forced(num_generated),
    )
