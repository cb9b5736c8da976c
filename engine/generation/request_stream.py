"""The outputs of one request on the event loop: tokens in, text events out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import TokenweirError
from engine.generation.sequence_text import SequenceText
from engine.requests.events import (
    Admitted,
    GenerationEvent,
    PositionLogprobs,
    RequestFinished,
    Timing,
    Usage,
)
from engine.requests.text import GenerationTokenizer
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
from engine.scheduling.sequence import TokenRequest


class RequestStream:
    """Gathers what one request's reader has not seen yet.

    A reader that is slower than the model gets more text at a time, never a longer queue; stop
    strings are found when the token comes, however slow the reader is; those of a beam search it
    has found itself, in `searched_text`. Where it shows only at the end which sequences are
    returned (beam search, best_of), nothing is streamed before.
    """

    def __init__(
        self,
        asked: TokenRequest,
        tokenizer: GenerationTokenizer,
        finish_sequence: Callable[[int], None],
    ) -> None:
        """`finish_sequence` tells the engine that no more tokens of a sequence are needed."""
        params = asked.params
        self._asked = asked
        self._finish_sequence = finish_sequence
        is_beam = params.strategy == "beam"
        self._is_streamed = not is_beam and params.num_sequences == params.num_outputs
        count = params.num_outputs if is_beam else params.num_sequences
        self._sequences = [
            SequenceText(index, params, tokenizer, asked.target_ids) for index in range(count)
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
    def request_id(self) -> str:
        """The request's id, as its caller chose it."""
        return self._asked.request_id

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

    def _best(self) -> list[SequenceText]:
        """Return the sequences with the highest scores, the lower index first among equals."""
        found = [sequence for sequence in self._sequences if sequence.is_finished]
        return sorted(found, key=lambda sequence: -sequence.score)[: self._asked.params.num_outputs]

    def _finished(self, timing: Timing, returned: list[SequenceText]) -> RequestFinished:
        made = sum(sequence.num_generated for sequence in self._sequences)
        num_output = sum(sequence.num_generated for sequence in returned)
        self.num_discarded += made - num_output
        asked = self._asked
        usage = Usage(
            input_tokens=len(asked.prompt_ids) + len(asked.target_ids),
            output_tokens=num_output,
            cached_input_tokens=self._num_cached,
            discarded_tokens=self.num_discarded,
        )
        return RequestFinished(
            asked.request_id,
            usage,
            timing,
            asked.seed,
            tuple(self._prompt_logprobs),
            asked.prompt_ids if asked.params.alignment else (),
        )
