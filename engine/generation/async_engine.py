"""A generating engine for event loops: requests in, streams of text events out."""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import count

from engine.background import in_background
from engine.config import EngineConfig
from engine.errors import (
    DeadlineExpired,
    Draining,
    EngineFailure,
    ExpiredInQueue,
    Overloaded,
    ReplicaLost,
    Starting,
    TokenweirError,
)
from engine.generation.core import EngineCore, StepTimes
from engine.generation.prompt import PromptReader
from engine.generation.request_stream import RequestStream, searched_text
from engine.package.device_certificate import device_name
from engine.package.package import Package
from engine.requests.events import GenerationEvent, RequestFinished, Score
from engine.requests.load import LoadSnapshot, WastedWork
from engine.requests.request import Constraint, GenerationRequest, SamplingParams, ScoreRequest
from engine.sampling.draws import TokenMatcher
from engine.scheduling.output import EngineOutput, FailedOutput
from engine.scheduling.sequence import TokenRequest
from engine.step_watch import StepWatch
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import Tokenizer
from engine.trial import Trial

_log = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 3  # of steps, before the engine says it is not healthy
_RETRY_AFTER = 1.0  # seconds, while starting or draining
_CAPABILITIES = (  # names of server/worker/capabilities.py: what is not here is refused there
    "generate",
    "stream",
    "greedy",
    "sampling",
    "beam",
    "num_outputs",
    "best_of",
    "typical_p",
    "controls",
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


@dataclass(frozen=True, slots=True)
class _Abort:
    key: int


@dataclass(frozen=True, slots=True)
class _FinishSequence:
    key: int
    index: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = TokenRequest | _Abort | _FinishSequence | _Stop


class AsyncEngine:
    """Runs an EngineCore in a thread of its own, which sleeps while there is nothing to do.

    Commands go to the thread through a queue and take effect between two steps. What a step brings
    comes back in one call to the event loop; streams and text are touched there only.
    """

    def __init__(
        self,
        package: Package,
        core: EngineCore,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        warm_up: Callable[[], Trial] = Trial,
    ) -> None:
        """`warm_up` runs the model before the first request, and returns what that has shown.

        It does so in the engine's thread: what a device captures there, it repeats only there.
        """
        generation = package.manifest.generation
        assert generation is not None
        self._package = package
        self._device = device_name(package, config)
        self._core = core
        self._tokenizer = tokenizer
        self._prompts = PromptReader(generation, tokenizer, config)
        self._constraints = ConstraintCompiler(
            tokenizer, generation.vocab_size, generation.eos_token_ids
        )
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._keys = count()
        self._streams: dict[int, RequestStream] = {}
        self._no_streams = asyncio.Event()
        # Then "warming", "running", "draining", "stopped"; "failed": the thread is dead or stuck.
        self._state = "new"
        self._warm_up = warm_up
        self._has_warmed_up = threading.Event()
        self._warm_up_error: Exception | None = None
        self._is_invariant = False  # until the warm-up says so
        self._load = core.scheduler.load()  # replaced by the engine's thread
        self._num_submitted = 0
        self._num_discarded = 0  # tokens that streams have thrown away
        self._num_taken = 0  # by the engine's thread
        self._failures_in_a_row = 0
        self._step_watch = StepWatch(package.manifest.name, config.max_step_seconds)
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def package(self) -> Package:
        """What is served."""
        return self._package

    @property
    def device(self) -> str:
        """Where the model runs: "cpu", or the name of the GPU."""
        return self._device

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What may be asked of this model."""
        manifest = self._package.manifest
        assert manifest.generation is not None
        found = {
            "alignment": manifest.generation.alignment,
            "batch_invariant": self._is_invariant,
        }
        return (*_CAPABILITIES, *(name for name, is_there in found.items() if is_there))

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before it takes requests."""
        return self._state in ("new", "warming")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; see Tokenizer."""
        return self._tokenizer.token_bytes(token_id)

    @property
    def healthy(self) -> bool:
        """False if the engine's thread is not running, or stuck, or the last steps all failed."""
        runs = self._state in ("running", "draining") and self._thread.is_alive()
        return runs and self._failures_in_a_row < _MAX_FAILURES_IN_A_ROW

    @property
    def step_times(self) -> StepTimes:
        """Where the time of all steps so far went."""
        return self._core.times

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""
        return replace(
            self._load,
            waiting=self._load.waiting + self._num_submitted - self._num_taken,
            tokens_per_second=self._core.scheduler.tokens_per_second(),
            wasted=self._load.wasted + WastedWork(discarded_tokens=self._num_discarded),
        )

    async def start(self) -> None:
        """Try the model out, then begin to take requests, on the running event loop.

        Raises PackageError if the model fails at any kind of call.
        """
        if self._state != "new":
            raise RuntimeError(f"an engine starts once; this one is {self._state}")
        self._loop = asyncio.get_running_loop()
        self._state = "warming"
        self._thread.start()
        await asyncio.to_thread(self._has_warmed_up.wait)
        if self._warm_up_error is not None:
            raise self._warm_up_error
        if self._state != "warming":  # stopped meanwhile
            return
        self._state = "running"
        self._watching = in_background(f"watching {self._thread.name}", self._fail_when_stuck)

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace` seconds for open ones, then end the rest.

        The rest fails with Draining, but what has begun and allows it ends with what there is.
        """
        was_running, self._state = self._state == "running", "draining"
        if self._streams and was_running and grace > 0:
            try:
                await asyncio.wait_for(self._no_streams.wait(), grace)
            except TimeoutError:
                _log.info("%d requests are open after %g s", len(self._streams), grace)
        self._state = "stopped"
        self._commands.put(_Stop())
        await self._step_watch.join(self._thread)
        for key, stream in self._streams.items():
            stream.take(FailedOutput(key, _draining()))
        if self._watching is not None:
            self._watching.cancel()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Give the events of a request: Admitted, then each sequence's, then RequestFinished.

        Raises InvalidRequest with the path of every wrong field, before anything waits; QueueFull,
        TokenBudgetFull, Starting, Draining, ReplicaLost, ExpiredInQueue, ExpiredInDecode,
        CannotMeet or EngineFailure.
        Closing or cancelling the iterator aborts the request by the end of the step in flight.
        """
        arrival = self._clock()
        self._refuse_if_closed()
        prompt = await self._prompts.read(request)
        matcher = await self._compile(request.params.constraint, prompt.target_ids)
        # The first of the decoder's given tokens has none before it that could predict it.
        score_from = None if request.params.prompt_logprobs is None else 1
        source = TokenRequest(
            next(self._keys),
            request.request_id,
            prompt.ids,
            request.params,
            _seed_of(request.params),
            arrival,
            request.deadline,
            target_ids=prompt.target_ids,
            priority=request.priority,
            tenant=request.tenant,
            score_from=score_from,
            matcher=matcher,
            text=searched_text(request.params, self._tokenizer, prompt.target_ids),
        )
        stream = self._submit(source)
        try:
            while True:
                for event in await stream.events():
                    yield event
                if stream.is_read:
                    return
        finally:
            self._close(source.key, stream)

    async def _compile(
        self, constraint: Constraint | None, given_ids: tuple[int, ...]
    ) -> TokenMatcher | None:
        if constraint is None:
            return None
        return await asyncio.to_thread(self._constraints.compile, constraint, given_ids)

    async def score(self, request: ScoreRequest) -> Score:
        """Return the log-probabilities of a given target, without generating anything.

        Raises as `generate`. Every token of the target that has one before it is scored: behind an
        encoder's source or the decoder's own text, that is all of them.
        """
        arrival = self._clock()
        self._refuse_if_closed()
        prompt = await self._prompts.read_scored(request)
        source = TokenRequest(
            next(self._keys),
            request.request_id,
            prompt.ids,
            SamplingParams(max_new_tokens=0, prompt_logprobs=request.top_logprobs),
            0,
            arrival,
            request.deadline,
            target_ids=prompt.target_ids,
            priority=request.priority,
            tenant=request.tenant,
            score_from=self._prompts.first_target(prompt),
        )
        stream = self._submit(source)
        try:
            events: list[GenerationEvent] = []
            while not stream.is_read:  # the scores of a piece of the target alone are no event
                events = await stream.events()
        finally:
            self._close(source.key, stream)
        end = events[-1]
        assert isinstance(end, RequestFinished)
        total = sum(position.chosen.logprob for position in end.prompt_logprobs)
        return Score(total, end.prompt_logprobs, end.usage, end.timing)

    def _submit(self, source: TokenRequest) -> RequestStream:
        """Hand a request to the engine's thread."""
        self._refuse_if_closed()
        if source.deadline is not None and self._clock() >= source.deadline:
            raise ExpiredInQueue(f"{source.request_id}: its deadline passed before it was queued")
        key = source.key
        stream = RequestStream(
            source.request_id,
            source.params,
            self._tokenizer,
            seed=source.seed,
            num_input_tokens=len(source.prompt_ids) + len(source.target_ids),
            finish_sequence=lambda index: self._commands.put(_FinishSequence(key, index)),
            prefix_ids=source.target_ids,
            source_ids=source.prompt_ids if source.params.alignment else (),
        )
        self._streams[key] = stream
        self._no_streams.clear()
        self._num_submitted += 1
        self._commands.put(source)
        return stream

    def _close(self, key: int, stream: RequestStream) -> None:
        if self._streams.pop(key, None) is not None:
            self._num_discarded += stream.num_discarded
        if not self._streams:
            self._no_streams.set()
        if not stream.has_ended:
            self._commands.put(_Abort(key))

    def _receive(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.key)
            if stream is None:  # its reader has gone away
                continue
            try:
                stream.take(output)
            except Exception:
                _log.exception("the output of %s cannot be decoded", stream.request_id)
                stream.take(FailedOutput(output.key, _failure(stream.request_id)))
                self._commands.put(_Abort(output.key))

    def _thread_has_died(self) -> None:
        self._state = "failed"
        for key, stream in self._streams.items():
            stream.take(FailedOutput(key, _failure(stream.request_id)))

    async def _fail_when_stuck(self) -> None:
        await self._step_watch.wait_until_over()
        self._state = "failed"
        for key, stream in self._streams.items():
            stream.take(FailedOutput(key, _lost()))

    def _refuse_if_closed(self) -> None:
        if self.is_warming:
            raise Starting("the model is still being loaded; try again", _RETRY_AFTER)
        if self._state == "failed":
            raise _lost()
        if self._state != "running":
            raise _draining()

    # Below: the engine's thread.

    def _run(self) -> None:
        self._try_out()
        try:
            while self._warm_up_error is None and self._take_commands():
                self._step()
        except Exception:
            _log.exception("the engine of %s has stopped", self._package.manifest.name)
            self._call_on_loop(self._thread_has_died)

    def _try_out(self) -> None:
        try:
            trial = self._warm_up()
            self._is_invariant = trial.rows_are_bit_equal
            self._step_watch.allow(trial.step_seconds)
        except Exception as error:
            self._warm_up_error = error
        self._has_warmed_up.set()

    def _take_commands(self) -> bool:
        """Carry out what has been asked for, waiting if there is nothing to do; False: stop."""
        scheduler = self._core.scheduler
        while not scheduler.has_work or not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Stop):
                self._hand_over(scheduler.drain(lambda request_id: _draining()))
                return False
            self._carry_out(command)
        return True

    def _carry_out(self, command: _Command) -> None:
        scheduler = self._core.scheduler
        match command:
            case TokenRequest():
                self._num_taken += 1
                try:
                    scheduler.add(command)
                except (Overloaded, DeadlineExpired) as error:
                    self._hand_over([FailedOutput(command.key, error)])
            case _Abort():
                scheduler.abort(command.key)
            case _FinishSequence():
                scheduler.finish_sequence(command.key, command.index)
        self._load = scheduler.load()

    def _step(self) -> None:
        self._hand_over(self._core.scheduler.take_outputs())
        try:
            with self._step_watch.step():
                outputs = self._core.step()
            self._failures_in_a_row = 0
        except Exception:
            _log.exception("a step of %s failed", self._package.manifest.name)
            self._failures_in_a_row += 1
            outputs = self._core.recover(_failure)
        self._load = self._core.scheduler.load()
        self._hand_over(outputs)

    def _hand_over(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._call_on_loop(self._receive, outputs)

    def _call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed, and with it every stream
            _log.warning("the event loop is closed; the engine stops")
            self._commands.put(_Stop())


def _seed_of(params: SamplingParams) -> int:
    """Return the seed of a request's draws: the one given, else a random one; 0 without draws."""
    if params.strategy != "sampling":
        return 0
    return secrets.randbits(64) if params.seed is None else params.seed


def _failure(request_id: str) -> TokenweirError:
    return EngineFailure(
        f"{request_id}: the engine failed in the middle of it; try again, and if it fails again "
        "look for this request id in the server's log"
    )


def _lost() -> TokenweirError:
    return ReplicaLost("the engine here no longer works; ask again", _RETRY_AFTER)


def _draining() -> TokenweirError:
    return Draining("the server is shutting down; try another or later", _RETRY_AFTER)
