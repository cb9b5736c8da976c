"""The text of one sequence on the event loop: tokens in, deltas and the end out."""

from __future__ import annotations

from engine.requests.events import (
    FinishReason,
    GenerationEvent,
    PositionLogprobs,
    SequenceFinished,
    TextDelta,
)
from engine.requests.request import SamplingParams
from engine.sampling.stop_rule import End, new_text
from engine.scheduling.output import HypothesisOutput, TokensOutput
from engine.text.tokenizer import Tokenizer


class SequenceText:
    """One sequence: every token it got, their text, and how much of both was sent.

    Text is made where it is wanted, of all tokens that came meanwhile.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prefix_ids: tuple[int, ...],
    ) -> None:
        self._index = index
        self._params = params
        self._detokenizer = new_text(
            params, tokenizer, len(prefix_ids), include_stop=params.include_stop
        )
        self.num_prefix = len(prefix_ids)
        self._token_bytes = tokenizer.token_bytes
        self._num_decoded = 0  # tokens whose text was made
        self._token_ids = list(prefix_ids)
        self._logprobs: list[PositionLogprobs] = []
        self._alignment: list[tuple[float, ...]] = []
        self._num_sent_ids = 0
        self._text: list[str] = []
        self._num_sent_pieces = 0
        self._sum_logprob = 0.0
        self._score: float | None = None
        self._end: End | None = None
        self._end_is_sent = False
        self._has_failed = False
        if prefix_ids:
            self._decode(None)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is taken."""
        return self._end is not None

    @property
    def has_ended_unsent(self) -> bool:
        """Whether its end was not sent yet."""
        return self._end is not None and not self._end_is_sent

    @property
    def num_unsent(self) -> int:
        """Tokens that were not sent yet, a given prefix among them."""
        return len(self._token_ids) - self._num_sent_ids

    @property
    def num_generated(self) -> int:
        """Tokens without the given prefix."""
        return len(self._token_ids) - self.num_prefix

    @property
    def pieces(self) -> list[bytes]:
        """Text of each token, a given prefix's among them, without that of an end of sequence."""
        is_ended = self._end is not None and self._end.reason is FinishReason.EOS
        return list(map(self._token_bytes, self._token_ids[: -1 if is_ended else None]))

    @property
    def score(self) -> float:
        """That of beam search, or the mean log-probability."""
        if self._score is not None:
            return self._score
        return self._sum_logprob / max(1, self.num_generated)

    def push(self, output: TokensOutput) -> None:
        """Take tokens in, and whatever ended the sequence with the last of them."""
        self._token_ids += output.token_ids
        self._sum_logprob = output.sum_logprob
        if output.positions:
            self._logprobs += output.positions
        if output.attention:
            self._alignment += output.attention
        if output.finish_reason is not None:
            self._decode(End(output.finish_reason, output.matched_stop))

    def cut(self, reason: FinishReason) -> None:
        """End with what there is."""
        if self._end is None:
            self._decode(End(reason))

    def fail(self) -> None:
        """Hold nothing back any longer: no more comes; without a token there is nothing to send."""
        self._has_failed = True
        if self.num_generated == 0:
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self._token_ids)
        elif self._end is None:
            self._decode(None)
            self._text.append(self._detokenizer.finish().text)

    def fill(self, output: HypothesisOutput) -> None:
        """Take in a whole sequence."""
        hypothesis = output.hypothesis
        self._alignment += output.alignment
        self._token_ids += hypothesis.token_ids
        self._logprobs += hypothesis.logprobs
        self._sum_logprob, self._score = hypothesis.sum_logprob, hypothesis.score
        self._decode(End(hypothesis.reason, hypothesis.matched_stop))

    def _decode(self, end: End | None) -> None:
        """Make the text of the tokens that have none yet; `end` is that by the last of them.

        A stop string in the text goes before it. Not in the text are an end-of-sequence token and,
        unless stops are kept, a stop token; and what is forced for the limit's sake tells nothing
        of the text, so no stop string is looked for in it.
        """
        params, text = self._params, self._detokenizer
        token_ids = self._token_ids[self._num_decoded :]
        self._num_decoded = len(self._token_ids)
        if end is None:
            self._text.append(text.push(token_ids).text)
            return
        is_limit = end.reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL)
        if is_limit and params.forced_end is not None:
            text.ignore_stops()
        is_stop_token = isinstance(end.stop, int) and not params.include_stop
        if end.reason is FinishReason.EOS or is_stop_token:
            token_ids = token_ids[:-1]
        self._text.append(text.push(token_ids).text)
        rest, stop = text.finish()
        self._text.append(rest)
        self._end = end if stop is None else End(FinishReason.STOP, stop)

    def take_events(self) -> list[GenerationEvent]:
        """Return what was not returned before."""
        events: list[GenerationEvent] = []
        if self._end is None and self._num_decoded < len(self._token_ids):
            self._decode(None)
        text = "".join(self._text[self._num_sent_pieces :])
        unsent_ids = tuple(self._token_ids[self._num_sent_ids :])
        is_end = self.has_ended_unsent
        # Tokens without text wait for the text they become part of, or for the end.
        if text or ((is_end or self._has_failed) and unsent_ids):
            first = max(0, self._num_sent_ids - self.num_prefix)
            events.append(TextDelta(self._index, text, unsent_ids, tuple(self._logprobs[first:])))
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self._token_ids)
        if is_end:
            self._end_is_sent = True
            events.append(self.finished(self._index, is_ranked=False, was_streamed=True))
        return events

    def take_end(self) -> list[GenerationEvent]:
        """Return the end with the whole sequence, of which no deltas were wanted, if it is new."""
        if not self.has_ended_unsent:
            return []
        self._end_is_sent = True
        return [self.finished(self._index, is_ranked=False)]

    def finished(
        self, index: int, *, is_ranked: bool = True, was_streamed: bool = False
    ) -> SequenceFinished:
        """Return the whole sequence; one that is ranked has a score."""
        assert self._end is not None
        return SequenceFinished(
            index=index,
            reason=self._end.reason,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            matched_stop=self._end.stop,
            sum_logprob=self._sum_logprob,
            score=self.score if is_ranked else 0.0,
            logprobs=tuple(self._logprobs),
            alignment=tuple(self._alignment),
            was_streamed=was_streamed,
        )
