"""The outputs of one request on the event loop: tokens in, text events out."""

from __future__ import annotations

import asyncio

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
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    HypothesisOutput,
    ScoresOutput,
    TokensOutput,
)
from engine.scheduling.sequence import TokenRequest
from engine.text.chat_format import num_reasoning_tokens
from engine.text.tokenizer import Tokenizer


class RequestStream:
    """Gathers the outputs that one request's reader has not seen; the engine cuts the deltas.

    A reader that is slower than the model gets more text at a time, never a longer queue. The
    engine has found the stop strings; here their text is cut off, and text that may become one is
    held back. Nothing is streamed if only the end shows which sequences are returned (beam search,
    best_of).

    One task reads. The engine's outputs wake it.
    """

    def __init__(self, asked: TokenRequest, tokenizer: Tokenizer) -> None:
        params = asked.params
        self._asked = asked
        is_beam = params.strategy == "beam"
        is_known = not is_beam and params.num_sequences == params.num_outputs
        self._deltas = asked.deltas if is_known else None
        self._are_ends_streamed = is_known
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
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # set while one waits
        self.is_read = False  # RequestFinished was returned

    @property
    def request_id(self) -> str:
        """The request's id, as its caller chose it."""
        return self._asked.request_id

    @property
    def has_ended(self) -> bool:
        """Whether the engine has no more outputs of the request."""
        return self._timing is not None or self._error is not None

    def take(self, output: EngineOutput) -> None:
        """Take in an output of the engine; nothing more once the request has ended."""
        if self.has_ended:
            return
        match output:
            case TokensOutput():
                self._sequences[output.index].push(output)
            case ScoresOutput():
                self._prompt_logprobs += output.positions
                return
            case CutOutput():
                self._sequences[output.index].cut(output.reason)
            case HypothesisOutput():
                self._sequences[output.index].fill(output)
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
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def events(self) -> list[GenerationEvent]:
        """Wait for events and return them; RequestFinished is the last.

        Raises the request's error once what came before it has been read.
        """
        while not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._reader = None
        return self._take_events()

    def _take_events(self) -> list[GenerationEvent]:
        self._has_news = self._error is not None  # it is raised by the next call
        events: list[GenerationEvent] = []
        if self._admitted:
            self._admitted = False
            events.append(self._admission())
        if self._are_ends_streamed:
            events += self._news()
        if self._error is not None and not events:
            raise self._error
        if self._timing is not None:
            self.is_read = True
            returned = self._sequences if self._are_ends_streamed else self._best()
            if not self._are_ends_streamed:
                events += [sequence.finished(i) for i, sequence in enumerate(returned)]
            events.append(self._finished(self._timing, returned))
        return events

    def _admission(self) -> Admitted:
        asked = self._asked
        ids = asked.prompt_ids if asked.params.prompt_token_ids else ()
        num_tokens = len(asked.prompt_ids) + len(asked.target_ids)
        return Admitted(asked.request_id, num_tokens, ids, asked.reasoning)

    def _news(self) -> list[GenerationEvent]:
        """Return the deltas that are long enough, or the last ones, and the ends."""
        events: list[GenerationEvent] = []
        for sequence in self._sequences:
            is_last = self._error is not None or sequence.has_ended_unsent
            if self._deltas is None:
                events += sequence.take_end()
            elif is_last or sequence.num_unsent >= self._deltas.min_tokens:
                events += sequence.take_events()
        return events

    def _best(self) -> list[SequenceText]:
        """Return the sequences with the highest scores, the lower index first among equals."""
        found = [sequence for sequence in self._sequences if sequence.is_finished]
        return sorted(found, key=lambda sequence: -sequence.score)[: self._asked.params.num_outputs]

    def _finished(self, timing: Timing, returned: list[SequenceText]) -> RequestFinished:
        made = sum(sequence.num_generated for sequence in self._sequences)
        num_output = sum(sequence.num_generated for sequence in returned)
        self.num_discarded += made - num_output
        asked, params = self._asked, self._asked.params
        usage = Usage(
            input_tokens=len(asked.prompt_ids) + len(asked.target_ids),
            output_tokens=num_output,
            cached_input_tokens=self._num_cached,
            discarded_tokens=self.num_discarded,
            reasoning_tokens=self._num_reasoning(returned),
        )
        return RequestFinished(
            asked.request_id,
            usage,
            timing,
            asked.seed,
            tuple(self._prompt_logprobs),
            asked.prompt_ids if params.alignment or params.prompt_token_ids else (),
            asked.reasoning,
        )

    def _num_reasoning(self, returned: list[SequenceText]) -> int:
        reasoning = self._asked.reasoning
        if reasoning is None or self._asked.params.constraint is not None:
            return 0
        is_begun = reasoning == "begun"
        return sum(
            num_reasoning_tokens(one.pieces, is_begun=is_begun, num_given=one.num_prefix)
            for one in returned
        )
