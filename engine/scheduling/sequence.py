"""A request inside the engine: a group of sequences that share a prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.requests.events import PositionLogprobs, Timing
from engine.requests.request import Deltas, Reasoning, SamplingParams
from engine.sampling.beam_search import BeamSearch
from engine.sampling.random_stream import SequenceDraws
from engine.sampling.stop_rule import End, StopRule
from engine.sampling.token_rules import TokenRules
from engine.scheduling.output import TokensOutput
from engine.text.tokenizer import Detokenizer

if TYPE_CHECKING:
    from engine.text.constraint import ConstraintMatcher  # loads llguidance


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A checked request as the scheduler takes it: token ids only."""

    key: int  # unique in the engine; request ids are chosen by clients and may come twice
    request_id: str
    prompt_ids: tuple[int, ...]  # encoder-decoder: the source
    params: SamplingParams
    seed: int
    arrival: float  # on the scheduler's clock, like the deadline
    deadline: float | None = None
    target_ids: tuple[int, ...] = ()  # encoder-decoder: the given beginning of the output
    priority: int = 0  # lower runs earlier
    tenant: str = ""
    matcher: ConstraintMatcher | None = None  # the constraint, at the beginning of the text
    score_from: int | None = None  # the first given token whose log-probability is wanted
    deltas: Deltas | None = Deltas()  # None: none are wanted
    reasoning: Reasoning | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One output in the making. Only the scheduler's parts change it."""

    request: Request
    index: int
    tokens: list[int]  # the prompt, or the decoder's start token, and what was generated
    num_prompt: int = 0  # how many of them were given
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_generated: int = 0
    is_finished: bool = False
    matcher: ConstraintMatcher | None = None  # the request's constraint, behind `tokens`
    plain_index: int = -1  # among the plain draws of the last step that it was in
    num_emitted: int = 0  # generated tokens that were handed over
    emit_at: int = 0  # so many generated tokens make a delta
    check_at: int = 0  # with so many generated tokens it may end, or they make a delta
    text: Detokenizer | None = None  # finds its stop strings, if it has some
    draws: SequenceDraws | None = None  # its random numbers; None: its plain draws are greedy
    sum_logprob: float = 0.0  # over the generated tokens
    positions: list[PositionLogprobs] = field(default_factory=list)  # not emitted yet, if asked for
    attention: list[tuple[float, ...]] = field(default_factory=list)  # likewise

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be chosen, or the last one is scored."""
        return len(self.tokens) - self.num_computed - self.request.is_score_only

    @property
    def num_drawing(self) -> int:
        """How many of its next tokens are being drawn, where it decodes."""
        return self.num_computed - len(self.tokens) + 1

    @property
    def num_steps_left(self) -> int:
        """Tokens that it may have beside those that are there or are being drawn."""
        return self.request.stop_rule.max_new_tokens - self.num_generated - self.num_drawing

    @property
    def num_pending(self) -> int:
        """Generated tokens that were not emitted."""
        return self.num_generated - self.num_emitted

    def emit(self, end: End | None = None) -> TokensOutput:
        """Return the pending tokens, which are emitted by that; the last ones at an end."""
        output = TokensOutput(
            self.request.key,
            self.index,
            self.tokens[self.num_prompt + self.num_emitted :],
            self.sum_logprob,
            end.reason if end else None,
            end.stop if end else None,
            self.positions,
            self.attention,
        )
        self.mark_emitted()
        return output

    def mark_emitted(self) -> None:
        """Note that all tokens were emitted, and set the next `emit_at` and `check_at`."""
        self.num_emitted = self.num_generated
        waits = self.request.is_paced and self.num_generated > 0  # the first ones do not
        self.emit_at = sys.maxsize if waits else self.num_emitted + self.request.tokens_at_once
        most = self.request.stop_rule.max_new_tokens
        self.check_at = min(most, self.emit_at) if self.text is None else 0
        if self.positions or self.attention:
            self.positions, self.attention = [], []

    def take(self, token_id: int) -> None:
        """Take in a token that was chosen."""
        self.tokens.append(token_id)
        self.num_generated += 1
        if self.matcher is not None and self.num_generated > self.request.num_forced:
            self.matcher.advance(token_id)


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's state of a request. Only the scheduler's parts change it."""

    asked: TokenRequest
    stop_rule: StopRule
    token_rules: TokenRules | None = None  # None: every token may come anywhere
    is_plain: bool = False  # all draws behind the first tokens are plain
    sequences: list[Sequence] = field(default_factory=list)
    needs_encoding: bool = False
    max_cost: int = 0  # the most tokens that it may come to compute
    num_computed: int = 0  # tokens computed so far, of source, prompt and all sequences
    num_cached: int = 0  # tokens of source or prompt that another request had computed
    admitted: float | None = None  # when first
    first_token: float | None = None
    last_token: float = 0.0
    steps: int = 0
    batch_size_total: int = 0  # sequences in those steps
    last_step: int = -1
    num_top: int = 1  # how many of the largest logits its draws look at
    score_from: int | None = None  # the first given token whose log-probability is still wanted
    search: BeamSearch | None = None
    beams: list[Sequence] = field(default_factory=list)  # its running hypotheses, in order
    # Attention to the source of each step's beams, if asked for.
    beam_attention: list[list[tuple[float, ...]]] = field(default_factory=list)
    key: int = field(init=False)  # in the engine
    # A delta has at least so many tokens of a sequence, if it does not end before.
    tokens_at_once: int = field(init=False, default=sys.maxsize)
    is_paced: bool = field(init=False, default=False)  # by time, too: see DeltaPacing
    is_aligned: bool = field(init=False)  # the attention to its source is asked for

    def __post_init__(self) -> None:
        self.key, self.is_aligned = self.asked.key, self.asked.params.alignment
        deltas, params = self.asked.deltas, self.asked.params
        if deltas is not None and params.num_sequences == params.num_outputs:
            self.tokens_at_once, self.is_paced = deltas.min_tokens, deltas.min_seconds > 0

    @property
    def is_score_only(self) -> bool:
        """Whether nothing is to be generated."""
        return self.asked.params.max_new_tokens == 0

    @property
    def needs_no_step(self) -> bool:
        """Whether nothing is to be computed: no new token, no log-probability of a given one."""
        first = self.score_from
        return self.is_score_only and (first is None or first >= self.leader.num_prompt)

    @property
    def draws_plainly(self) -> bool:
        """Whether the draws of its sequences are plain now; the first ones of several are more."""
        return self.is_plain and (self.first_token is not None or len(self.sequences) == 1)

    @property
    def num_forced(self) -> int:
        """How many of the first generated tokens are forced: a constraint has passed them."""
        return len(self.asked.params.forced_begin)

    @property
    def may_be_cut(self) -> bool:
        """Whether it has begun, and allows to be ended with what there is."""
        return self.asked.params.allow_partial and self.admitted is not None

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all."""
        return self.sequences[0]

    @property
    def is_finished(self) -> bool:
        """Whether no sequence runs any more."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def num_unfinished(self) -> int:
        """How many of its sequences have not ended."""
        return sum(not sequence.is_finished for sequence in self.sequences)

    @property
    def reading(self) -> list[Sequence]:
        """The sequences that compute their tokens so far: the leader, for all.

        All that run do so in a request that was put back into the queue.
        """
        if self.first_token is None:
            return [self.leader]
        if self.search is not None:
            return self.beams
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def emit(self) -> list[TokensOutput]:
        """Return the pending tokens of its sequences, before it ends in another way."""
        if self.search is not None:  # emits whole outputs only
            return []
        return [one.emit() for one in self.sequences if not one.is_finished and one.num_pending]

    def end(self) -> None:
        """Let no sequence run any more."""
        for sequence in self.sequences:
            sequence.is_finished = True

    def start_again(self, *, needs_encoding: bool) -> None:
        """Forget what was computed; the tokens stay, and are computed like those of a prompt."""
        self.needs_encoding = needs_encoding
        self.num_computed = 0
        for sequence in self.sequences:
            sequence.num_computed = 0

    def took_part(self, step: int, batch_size: int) -> None:
        """Count a step, once however many of the sequences were in it."""
        if self.last_step != step:
            self.last_step = step
            self.steps += 1
            self.batch_size_total += batch_size

    def timing(self) -> Timing:
        """Return where the time went, after the last token."""
        admitted = self.last_token if self.admitted is None else self.admitted
        first = admitted if self.first_token is None else self.first_token
        return Timing(
            queue=admitted - self.asked.arrival,
            prefill=first - admitted,
            decode=self.last_token - first,
            time_to_first_token=first - self.asked.arrival,
            steps=self.steps,
            mean_batch_size=self.batch_size_total / max(1, self.steps),
        )
