"""Engines as a worker uses them: those of `engine`, and fakes in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from engine.one_pass.prediction import Prediction, PredictionItem
from engine.package.package import Package
from engine.requests.events import GenerationEvent, Score
from engine.requests.load import LoadSnapshot
from engine.requests.request import GenerationRequest, ScoreRequest
from engine.step_measures import StepMeasures


class Engine(Protocol):
    """The part common to both kinds: `AsyncEngine` and `EncoderEngine` in production."""

    @property
    def package(self) -> Package:
        """The package that is served."""

    @property
    def device(self) -> str:
        """The device of the model: "cpu", or the name of the GPU."""

    @property
    def num_threads(self) -> int:
        """Threads of the CPU that the model may use."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The tasks that this model may be asked for."""

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before it takes requests."""

    @property
    def healthy(self) -> bool:
        """False once the engine cannot serve any more."""

    @property
    def measures(self) -> StepMeasures:
        """Measurements of the steps so far."""

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""

    async def start(self) -> None:
        """Try the model out, then begin to take requests; PackageError if it fails."""

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace` seconds for open ones, then end the rest."""


@runtime_checkable
class GeneratingEngine(Engine, Protocol):
    """Continues prompts, and scores given targets if it can; `AsyncEngine` in production."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield Admitted, deltas and ends of sequences, then RequestFinished."""

    async def score(self, request: ScoreRequest) -> Score:
        """Return the log-probabilities of the target's tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text."""

    def source_token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a source."""


@runtime_checkable
class PredictingEngine(Engine, Protocol):
    """Runs one-pass models; `EncoderEngine` in production."""

    async def predict(
        self,
        items: Sequence[PredictionItem],
        *,
        request_id: str,
        deadline: float | None,
        path: str = "items",
    ) -> Prediction:
        """Return what the model says of each item."""
