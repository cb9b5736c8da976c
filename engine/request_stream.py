"""The outputs of one request on the event loop: tokens in, text events out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import TokenweirError
from engine.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    TokenOutput,
)
from engine.request import (
    Admitted,
    FinishReason,
    GenerationEvent,
    RequestFinished,
    SamplingParams,
    SequenceFinished,
    TextDelta,
    Timing,
    Usage,
)
from engine.tokenizer import IncrementalDetokenizer, Piece, Tokenizer


class RequestStream:
    """Gathers what one request's reader has not seen yet.

    A reader that is slower than the model gets more text at a time, never a longer queue; stop
    strings are found when the token comes, however slow the reader is.
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
    ) -> None:
        self.request_id = request_id
        self._seed = seed
        self._num_input_tokens = num_input_tokens
        self._finish_sequence = finish_sequence
        self._sequences = [
            _SequenceText(index, params, tokenizer) for index in range(params.num_outputs)
        ]
        self._admitted = False
        self.num_discarded = 0  # tokens that came behind a stop string
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
            case AdmittedOutput():
                self._admitted = True
            case FinishedOutput():
                self._timing = output.timing
            case FailedOutput():
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
        for sequence in self._sequences:
            events += sequence.take_events()
        if self._error is not None and not events:
            raise self._error
        if self._error is None:  # else it is to be raised by the next call
            self._changed.clear()
        if self._timing is not None:
            self.is_read = True
            events.append(self._finished(self._timing))
        return events

    def _take_token(self, output: TokenOutput) -> None:
        sequence = self._sequences[output.index]
        if sequence.is_finished:  # it was computed while the stop string was found
            self.num_discarded += 1
            return
        sequence.push(output)
        if sequence.is_finished and output.finish_reason is None:
            self._finish_sequence(output.index)

    def _finished(self, timing: Timing) -> RequestFinished:
        usage = Usage(
            input_tokens=self._num_input_tokens,
            output_tokens=sum(len(sequence.token_ids) for sequence in self._sequences),
            discarded_tokens=self.num_discarded,
        )
        return RequestFinished(self.request_id, usage, timing, self._seed)


class _SequenceText:
    """One sequence: every token it got, their text, and how much of both was sent."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._index = index
        self._include_stop = params.include_stop
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.stop_strings, params.include_stop, params.min_new_tokens
        )
        self.token_ids: list[int] = []
        self._num_sent_ids = 0
        self._text: list[str] = []
        self._num_sent_pieces = 0
        self._sum_logprob = 0.0
        self._reason: FinishReason | None = None
        self._matched_stop: str | int | None = None
        self._end_is_sent = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is taken."""
        return self._reason is not None

    def push(self, output: TokenOutput) -> None:
        """Take a token in, and whatever ended the sequence with it."""
        self.token_ids.append(output.token_id)
        self._sum_logprob += output.logprob
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

    def _is_text(self) -> bool:
        """Whether the last token belongs to the text: the end and a matched stop do not."""
        if self._reason is FinishReason.STOP:
            return self._include_stop
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
        unsent_ids = tuple(self.token_ids[self._num_sent_ids :])
        is_end = self._reason is not None and not self._end_is_sent
        # Tokens without text wait for the text they become part of, or for the end.
        if text or (is_end and unsent_ids):
            events.append(TextDelta(self._index, text, unsent_ids))
            self._num_sent_pieces, self._num_sent_ids = len(self._text), len(self.token_ids)
        if is_end and self._reason is not None:
            self._end_is_sent = True
            events.append(
                SequenceFinished(
                    index=self._index,
                    reason=self._reason,
                    text="".join(self._text),
                    token_ids=tuple(self.token_ids),
                    matched_stop=self._matched_stop,
                    sum_logprob=self._sum_logprob,
                )
            )
        return events
