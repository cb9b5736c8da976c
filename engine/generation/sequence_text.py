"""The text of one sequence on the event loop: tokens in, deltas and the end out."""

from __future__ import annotations

from collections.abc import Sequence

from engine.requests.events import (
    FinishReason,
    GenerationEvent,
    PositionLogprobs,
    SequenceFinished,
    TextDelta,
)
from engine.requests.request import SamplingParams
from engine.requests.text import Detokenizer, GenerationTokenizer
from engine.sampling.stop_rule import End, push_text
from engine.scheduling.output import HypothesisOutput, TokenOutput


def searched_text(
    params: SamplingParams, tokenizer: GenerationTokenizer, prefix_ids: tuple[int, ...] = ()
) -> Detokenizer | None:
    """Return the text in which a beam search finds its stop strings, behind the given prefix.

    None if there are none to find. It finds those that RequestStream does.
    """
    if params.strategy != "beam" or not params.stop_strings:
        return None
    # With the stop no text is held back, so that there is less to copy for every candidate.
    text = _detokenizer(params, tokenizer, len(prefix_ids), include_stop=True)
    text.push(prefix_ids)
    return text


def _detokenizer(
    params: SamplingParams, tokenizer: GenerationTokenizer, num_prefix: int, include_stop: bool
) -> Detokenizer:
    min_new_tokens = max(1, params.min_new_tokens)  # the prefix alone ends nothing
    return tokenizer.detokenizer(
        params.stop_strings,
        include_stop=include_stop,
        min_new_tokens=num_prefix + min_new_tokens,
    )


class SequenceText:
    """One sequence: every token it got, their text, and how much of both was sent."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: GenerationTokenizer,
        prefix_ids: tuple[int, ...],
    ) -> None:
        self._index = index
        self._params = params
        self._detokenizer = _detokenizer(params, tokenizer, len(prefix_ids), params.include_stop)
        self._num_prefix = len(prefix_ids)
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
            self._add(prefix_ids, None)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is taken."""
        return self._end is not None

    @property
    def num_generated(self) -> int:
        """Tokens without the given prefix."""
        return len(self._token_ids) - self._num_prefix

    @property
    def score(self) -> float:
        """That of beam search, or the mean log-probability."""
        if self._score is not None:
            return self._score
        return self._sum_logprob / max(1, self.num_generated)

    def push(self, output: TokenOutput) -> None:
        """Take a token in, and whatever ended the sequence with it."""
        self._token_ids.append(output.token_id)
        self._sum_logprob += output.logprob
        if output.position is not None:
            self._logprobs.append(output.position)
        if output.attention:
            self._alignment.append(output.attention)
        reason = output.finish_reason
        self._add([output.token_id], None if reason is None else End(reason, output.matched_stop))

    def cut(self, reason: FinishReason) -> None:
        """End with what there is."""
        if self._end is None:
            self._add((), End(reason))

    def fail(self) -> None:
        """Hold nothing back any longer: no more comes; without a token there is nothing to send."""
        self._has_failed = True
        if self.num_generated == 0:
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self._token_ids)
        elif self._end is None:
            self._text.append(self._detokenizer.finish().text)

    def fill(self, output: HypothesisOutput) -> None:
        """Take in a whole sequence."""
        hypothesis = output.hypothesis
        self._alignment += output.alignment
        self._token_ids += hypothesis.token_ids
        self._logprobs += hypothesis.logprobs
        self._sum_logprob, self._score = hypothesis.sum_logprob, hypothesis.score
        self._add(hypothesis.token_ids, End(hypothesis.reason, hypothesis.matched_stop))

    def _add(self, token_ids: Sequence[int], end: End | None) -> None:
        text, self._end = push_text(self._detokenizer, token_ids, end, self._params)
        if text:
            self._text.append(text)

    def take_events(self) -> list[GenerationEvent]:
        """Return what was not returned before."""
        events: list[GenerationEvent] = []
        text = "".join(self._text[self._num_sent_pieces :])
        unsent_ids = tuple(self._token_ids[self._num_sent_ids :])
        is_end = self._end is not None and not self._end_is_sent
        # Tokens without text wait for the text they become part of, or for the end.
        if text or ((is_end or self._has_failed) and unsent_ids):
            first = max(0, self._num_sent_ids - self._num_prefix)
            events.append(TextDelta(self._index, text, unsent_ids, tuple(self._logprobs[first:])))
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self._token_ids)
        if is_end:
            self._end_is_sent = True
            events.append(self.finished(self._index, was_streamed=True))
        return events

    def finished(self, index: int, *, was_streamed: bool = False) -> SequenceFinished:
        """Return the whole sequence."""
        assert self._end is not None
        return SequenceFinished(
            index=index,
            reason=self._end.reason,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            matched_stop=self._end.stop,
            sum_logprob=self._sum_logprob,
            score=0.0 if was_streamed else self.score,
            logprobs=tuple(self._logprobs),
            alignment=tuple(self._alignment),
            was_streamed=was_streamed,
        )
