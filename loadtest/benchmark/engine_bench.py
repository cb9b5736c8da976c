"""An engine in this process, and how long it takes for work that it is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import StepTimes
from engine.package.package import Package
from engine.requests.events import RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from loadtest.benchmark.work import Prompt, generation_contract


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    token_ids: tuple[int, ...]
    time_to_first_token: float  # seconds from its arrival
    end_to_end: float


@dataclass(frozen=True)
class Measured:
    """Requests that were submitted at once, from then until the last has ended."""

    seconds: float
    answers: tuple[Answer, ...]  # in the order of the requests
    times: StepTimes


class EngineBench:
    """An engine, and how long it takes for work that it is given."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._ids = count()

    @classmethod
    def load(
        cls,
        package: Package,
        *,
        max_num_seqs: int,
        settings: EngineConfig | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> EngineBench:
        """Load the engine of a package that generates; else raise PackageError."""
        generation_contract(package)
        config = settings_for(package, max_num_seqs, settings or EngineConfig())
        engine = load_engine(package, config, tell=tell)
        assert isinstance(engine, AsyncEngine), "it has a generation contract"
        return cls(engine)

    async def start(self) -> None:
        """Begin to take work."""
        await self._engine.start()

    async def stop(self) -> None:
        """End the engine's thread."""
        await self._engine.stop()

    async def measure(
        self, prompts: Sequence[Prompt], params: Callable[[int], SamplingParams]
    ) -> Measured:
        """Submit all prompts at once; `params` gives those of a prompt by its index."""
        before = self._engine.step_times
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(self._answer(prompt, params(index)) for index, prompt in enumerate(prompts))
        )
        seconds = time.perf_counter() - started
        return Measured(seconds, tuple(answers), self._engine.step_times.since(before))

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        started = time.perf_counter()
        token_ids: tuple[int, ...] = ()
        first = 0.0
        request = GenerationRequest(f"bench-{next(self._ids)}", prompt, params)
        async for event in self._engine.generate(request):
            if isinstance(event, SequenceFinished) and event.index == 0:
                token_ids = event.token_ids
            elif isinstance(event, RequestFinished):
                first = event.timing.time_to_first_token
        return Answer(token_ids, first, time.perf_counter() - started)


def settings_for(package: Package, num_seqs: int, settings: EngineConfig) -> EngineConfig:
    """Return settings that take in so many requests at once; a package on a GPU as it was shown."""
    shown = package.manifest.certificate.device
    on_gpu = settings.device_for(package.manifest.target) == "cuda"
    if on_gpu and shown and not settings.decode_buckets:
        if num_seqs <= max(shown.buckets, default=0):
            settings = settings.with_buckets(shown.buckets)
            num_seqs = settings.max_num_seqs
    return _for_so_many(num_seqs, settings)


def _for_so_many(max_num_seqs: int, settings: EngineConfig) -> EngineConfig:
    return replace(
        settings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(
            settings.max_num_batched_tokens, max_num_seqs + settings.prefill_chunk_size
        ),
        max_queue_size=max(settings.max_queue_size, max_num_seqs),
        reuse_prefixes=False,  # the same prompts come round after round
    )
