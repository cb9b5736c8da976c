"""A generating engine for event loops: requests in, streams of text events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import ExpiredInQueue
from engine.generation.core import EngineCore, StepTimes
from engine.generation.engine_thread import EngineThread
from engine.generation.request_reader import Constraints, RequestReader
from engine.generation.request_stream import RequestStream
from engine.generation.steps import Steps
from engine.lifecycle.engine import Engine, lifecycle_in_thread
from engine.lifecycle.lifecycle import ErrorOf, WarmUpResult, draining, failure
from engine.package.package import Package
from engine.requests.events import GenerationEvent, RequestFinished, Score
from engine.requests.load import LoadSnapshot, WastedWork
from engine.requests.request import GenerationRequest, ScoreRequest
from engine.scheduling.output import EngineOutput, FailedOutput
from engine.scheduling.sequence import TokenRequest
from engine.step_measures import StepMeasures
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import SourceAndTarget

_log = logging.getLogger(__name__)

_CAPABILITIES = (  # names of server/worker/checks.py: what is not here is refused there
    "generate",
    "stream",
    "greedy",
    "sampling",
    "beam",
    "num_outputs",
    "best_of",
    "typical_p",
    "controls",
    "forced_tokens",
    "logprobs",
    "prompt_logprobs",
    "target_prefix",
    "score",
    "stop",
    "constraint",
    "priority",
    "fair_share",
    "allow_partial",
)


class AsyncEngine(Engine):
    """Streams and texts of what an EngineCore makes in a thread or a process of its own.

    Streams and text are touched on the event loop.
    """

    def __init__(
        self,
        package: Package,
        core: EngineCore | Steps,
        tokenizers: SourceAndTarget,
        config: EngineConfig,
        *,
        constraints: Constraints,
        chat: ChatTemplate | None = None,
        clock: Callable[[], float] = time.monotonic,
        warm_up: Callable[[], WarmUpResult] = WarmUpResult,
    ) -> None:
        """A `core` gets a thread; steps that are made elsewhere know how the model is tried out.

        `warm_up` runs the model before the first request, and returns what that has shown.

        `chat` makes texts of conversations.
        """
        generation = package.manifest.generation
        assert generation is not None
        self._steps: Steps
        if isinstance(core, EngineCore):
            self._steps = EngineThread(
                core, lifecycle_in_thread(package, config, "engine", warm_up)
            )
        else:
            self._steps = core
        super().__init__(package, config, self._steps.lifecycle)
        self._tokenizers = tokenizers
        self._chat = chat
        self._reader = RequestReader(generation, tokenizers, constraints, config, chat)
        self._clock = clock
        self._streams: dict[int, RequestStream] = {}
        self._no_streams = asyncio.Event()
        self._num_discarded = 0  # tokens that streams have thrown away

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities of this model."""
        manifest = self._package.manifest
        assert manifest.generation is not None
        found = {
            "alignment": manifest.generation.alignment,
            "batch_invariant": self._lifecycle.is_invariant,
            "chat": self._chat is not None,
        }
        if self._chat is not None and (form := self._chat.tool_format) is not None:
            found[f"tools:{form}"] = True
        return (*_CAPABILITIES, *(name for name, is_there in found.items() if is_there))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; see Tokenizer."""
        return self._tokenizers.target.token_bytes(token_id)

    def source_token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a source, which may have other tokens."""
        return self._tokenizers.source.token_bytes(token_id)

    @property
    def step_times(self) -> StepTimes:
        """The times of all steps so far."""
        return self._steps.times

    @property
    def measures(self) -> StepMeasures:
        """The measures of all steps so far."""
        return self._steps.measures

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""
        load = self._steps.load()
        return replace(load, wasted=load.wasted + WastedWork(discarded_tokens=self._num_discarded))

    async def start(self) -> None:
        """Try the model out, then begin to take requests, on the running event loop.

        Raises PackageError if the model fails at any kind of call.
        """
        await self._steps.start(self._receive, self._fail_open)

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace` seconds for open ones, then end the rest.

        The rest fails with Draining, but what has begun and allows it ends with what there is.
        """
        await self._lifecycle.stop(grace, self._wait_for_streams, self._steps.end)
        self._fail_open(lambda request_id: draining())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Give the events of a request: Admitted, then each sequence's, then RequestFinished.

        Raises InvalidRequest with the path of every wrong field, before anything waits; QueueFull,
        TokenBudgetFull, Starting, Draining, ReplicaLost, ExpiredInQueue, ExpiredInDecode,
        CannotMeet or EngineFailure.
        Closing or cancelling the iterator aborts the request by the end of the step in flight.
        """
        arrival = self._clock()
        self._lifecycle.refuse_if_closed()
        asked = await self._reader.read(request, arrival)
        stream = self._submit(asked)
        try:
            while True:
                for event in await stream.events():
                    yield event
                if stream.is_read:
                    return
        finally:
            self._close(asked.key, stream)

    async def score(self, request: ScoreRequest) -> Score:
        """Return the log-probabilities of a given target, without generating anything.

        Raises as `generate`. Every token of the target that has one before it is scored: behind an
        encoder's source or the decoder's own text, that is all of them.
        """
        arrival = self._clock()
        self._lifecycle.refuse_if_closed()
        asked = await self._reader.read_scored(request, arrival)
        stream = self._submit(asked)
        try:
            events: list[GenerationEvent] = []
            while not stream.is_read:  # the scores of a piece of the target alone are no event
                events = await stream.events()
        finally:
            self._close(asked.key, stream)
        end = events[-1]
        assert isinstance(end, RequestFinished)
        total = sum(position.chosen.logprob for position in end.prompt_logprobs)
        return Score(total, end.prompt_logprobs, end.usage, end.timing)

    def _submit(self, asked: TokenRequest) -> RequestStream:
        """Let a request be scheduled."""
        self._lifecycle.refuse_if_closed()
        if asked.deadline is not None and self._clock() >= asked.deadline:
            raise ExpiredInQueue(f"{asked.request_id}: its deadline passed before it was queued")
        key = asked.key
        stream = RequestStream(asked, self._tokenizers.target)
        self._streams[key] = stream
        self._no_streams.clear()
        self._steps.add(asked)
        return stream

    def _close(self, key: int, stream: RequestStream) -> None:
        if self._streams.pop(key, None) is not None:
            self._num_discarded += stream.num_discarded
        if not self._streams:
            self._no_streams.set()
        if not stream.has_ended:
            self._steps.abort(key)

    def _receive(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.key)
            if stream is None:  # its reader has gone away
                continue
            try:
                stream.take(output)
            except Exception:
                _log.exception("the output of %s cannot be decoded", stream.request_id)
                stream.take(FailedOutput(output.key, failure(stream.request_id)))
                self._steps.abort(output.key)

    def _fail_open(self, error_of: ErrorOf) -> None:
        for key, stream in self._streams.items():
            stream.take(FailedOutput(key, error_of(stream.request_id)))

    async def _wait_for_streams(self) -> None:
        if self._streams:
            await self._no_streams.wait()
