"""The outputs of one request on the event loop: tokens in, text events out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import TokenweirError
from engine.requests.events import (
    Admitted,
    FinishReason,
    GenerationEvent,
    PositionLogprobs,
    RequestFinished,
    SequenceFinished,
    TextDelta,
    Timing,
    Usage,
)
from engine.requests.request import SamplingParams
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
    TokenOutput,
)
from engine.text.tokenizer import IncrementalDetokenizer, Piece, Tokenizer


class RequestStream:
    """Gathers what one request's reader has not seen yet.

    A reader that is slower than the model gets more text at a time, never a longer queue; stop
    strings are found when the token comes, however slow the reader is; those of a beam search it
    has found itself, in `searched_text`. Where it shows only at the end which sequences are
    returned (beam search, best_of), nothing is streamed before.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        seed: int,
        num_input_tokens: int,
        finish_sequence: Callable[[int], None],  # tells the engine that no more tokens are needed
        prefix_ids: tuple[int, ...] = (),  # that every output begins with
        source_ids: tuple[int, ...] = (),  # that its alignment is to, if asked for
    ) -> None:
        self.request_id = request_id
        self._seed = seed
        self._num_input_tokens = num_input_tokens
        self._source_ids = source_ids
        self._finish_sequence = finish_sequence
        self._num_outputs = params.num_outputs
        is_beam = params.strategy == "beam"
        self._is_streamed = not is_beam and params.num_sequences == params.num_outputs
        count = params.num_outputs if is_beam else params.num_sequences
        self._sequences = [
            _SequenceText(index, params, tokenizer, prefix_ids) for index in range(count)
        ]
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._admitted = False
        self._num_cached = 0
        self.num_discarded = 0  # tokens of nothing that is returned
        self._timing: Timing | None = None
        self._error: TokenweirError | None = None
        self._changed = asyncio.Event()
        self.is_read = False  # RequestFinished was returned

    @property
    def has_ended(self) -> bool:
        """Whether the engine has nothing more to tell of the request."""
        return self._timing is not None or self._error is not None

    def take(self, output: EngineOutput) -> None:
        """Take in what the engine tells; nothing more once the request has ended."""
        if self.has_ended:
            return
        match output:
            case TokenOutput():
                self._take_token(output)
            case CutOutput():
                self._sequences[output.index].cut(output.reason)
            case HypothesisOutput():
                self._sequences[output.index].fill(output)
            case ScoresOutput():
                self._prompt_logprobs += output.positions
            case AdmittedOutput():
                self._admitted = True
            case FinishedOutput():
                self.num_discarded += output.discarded_tokens
                self._num_cached = output.cached_tokens
                self._timing = output.timing
            case FailedOutput():
                for sequence in self._sequences:
                    sequence.fail()
                self._error = output.error
        self._changed.set()

    async def events(self) -> list[GenerationEvent]:
        """Wait for something new and return all of it; RequestFinished is the last.

        Raises the request's error once what came before it has been read.
        """
        await self._changed.wait()
        events: list[GenerationEvent] = []
        if self._admitted:
            self._admitted = False
            events.append(Admitted(self.request_id))
        if self._is_streamed:
            for sequence in self._sequences:
                events += sequence.take_events()
        if self._error is not None and not events:
            raise self._error
        if self._error is None:  # else it is to be raised by the next call
            self._changed.clear()
        if self._timing is not None:
            self.is_read = True
            returned = self._sequences if self._is_streamed else self._best()
            if not self._is_streamed:
                events += [sequence.finished(i) for i, sequence in enumerate(returned)]
            events.append(self._finished(self._timing, returned))
        return events

    def _take_token(self, output: TokenOutput) -> None:
        sequence = self._sequences[output.index]
        if sequence.is_finished:  # it was computed while the stop string was found
            self.num_discarded += 1
            return
        sequence.push(output)
        if sequence.is_finished and output.finish_reason is None:
            self._finish_sequence(output.index)

    def _best(self) -> list[_SequenceText]:
        """Return the sequences with the highest scores, the lower index first among equals."""
        found = [sequence for sequence in self._sequences if sequence.is_finished]
        return sorted(found, key=lambda sequence: -sequence.score)[: self._num_outputs]

    def _finished(self, timing: Timing, returned: list[_SequenceText]) -> RequestFinished:
        made = sum(sequence.num_generated for sequence in self._sequences)
        num_output = sum(sequence.num_generated for sequence in returned)
        self.num_discarded += made - num_output
        usage = Usage(
            input_tokens=self._num_input_tokens,
            output_tokens=num_output,
            cached_input_tokens=self._num_cached,
            discarded_tokens=self.num_discarded,
        )
        return RequestFinished(
            self.request_id,
            usage,
            timing,
            self._seed,
            tuple(self._prompt_logprobs),
            self._source_ids,
        )


def searched_text(
    params: SamplingParams, tokenizer: Tokenizer, prefix_ids: tuple[int, ...] = ()
) -> IncrementalDetokenizer | None:
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
    params: SamplingParams, tokenizer: Tokenizer, num_prefix: int, include_stop: bool
) -> IncrementalDetokenizer:
    min_new_tokens = max(1, params.min_new_tokens)  # the prefix alone ends nothing
    return IncrementalDetokenizer(
        tokenizer, params.stop_strings, include_stop, num_prefix + min_new_tokens
    )


class _SequenceText:
    """One sequence: every token it got, their text, and how much of both was sent."""

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, prefix_ids: tuple[int, ...]
    ) -> None:
        self._index = index
        self._include_stop = params.include_stop
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
        self._reason: FinishReason | None = None
        self._matched_stop: str | int | None = None
        self._end_is_sent = False
        self._has_failed = False
        if prefix_ids:
            self._add(self._detokenizer.push(prefix_ids))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is taken."""
        return self._reason is not None

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
        self._reason, self._matched_stop = output.finish_reason, output.matched_stop
        if self._is_text():
            self._add(self._detokenizer.push([output.token_id]))
        if self._reason is not None:
            self._add(self._detokenizer.finish())

    def cut(self, reason: FinishReason) -> None:
        """End with what there is."""
        if self._reason is None:
            self._reason = reason
            self._add(self._detokenizer.finish())

    def fail(self) -> None:
        """Hold nothing back any longer: no more comes; without a token there is nothing to send."""
        self._has_failed = True
        if self.num_generated == 0:
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self._token_ids)
        elif self._reason is None:
            self._add(self._detokenizer.finish())

    def fill(self, output: HypothesisOutput) -> None:
        """Take in a whole sequence."""
        hypothesis = output.hypothesis
        self._alignment += output.alignment
        self._token_ids += hypothesis.token_ids
        self._logprobs += hypothesis.logprobs
        self._sum_logprob, self._score = hypothesis.sum_logprob, hypothesis.score
        self._reason, self._matched_stop = hypothesis.reason, hypothesis.matched_stop
        text_ids = hypothesis.token_ids[: None if self._is_text() else -1]
        self._add(self._detokenizer.push(text_ids))
        self._add(self._detokenizer.finish())

    def _is_text(self) -> bool:
        """Whether the last token belongs to the text: the end and a matched stop token do not."""
        if self._reason is FinishReason.STOP:
            # A stop string may be a part of the token only, and the detokenizer cuts it out.
            return self._include_stop or isinstance(self._matched_stop, str)
        return self._reason is not FinishReason.EOS

    def _add(self, piece: Piece) -> None:
        if piece.text:
            self._text.append(piece.text)
        if piece.stop is not None:
            self._reason, self._matched_stop = FinishReason.STOP, piece.stop

    def take_events(self) -> list[GenerationEvent]:
        """Return what was not returned before."""
        events: list[GenerationEvent] = []
        text = "".join(self._text[self._num_sent_pieces :])
        unsent_ids = tuple(self._token_ids[self._num_sent_ids :])
        is_end = self._reason is not None and not self._end_is_sent
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
        assert self._reason is not None
        return SequenceFinished(
            index=index,
            reason=self._reason,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            matched_stop=self._matched_stop,
            sum_logprob=self._sum_logprob,
            score=0.0 if was_streamed else self.score,
            logprobs=tuple(self._logprobs),
            alignment=tuple(self._alignment),
            was_streamed=was_streamed,
        )
