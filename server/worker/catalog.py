"""The models that a worker serves, found by what a request says of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from engine.errors import (
    CapabilityNotSupported,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    ModelVersionNotFound,
)
from engine.one_pass.prediction import Prediction, PredictionItem
from engine.package.package import Package
from engine.requests.events import GenerationEvent, Score
from engine.requests.load import LoadSnapshot
from engine.requests.request import GenerationRequest, ScoreRequest
from server.worker.answers import ServedModel

_MAX_ECHO = 64  # characters of a name that an error repeats


class Engine(Protocol):
    """What both kinds of engine have; `AsyncEngine` and `EncoderEngine` in production."""

    @property
    def package(self) -> Package:
        """What is served."""

    @property
    def device(self) -> str:
        """Where the model runs: "cpu", or the name of the GPU."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What may be asked of this model."""

    @property
    def is_warming(self) -> bool:
        """Whether the model has still to be tried out, before it takes requests."""

    @property
    def healthy(self) -> bool:
        """False once the engine cannot serve any more."""

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now."""

    async def start(self) -> None:
        """Try the model out, then begin to take requests; PackageError if it fails."""

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace` seconds for open ones, then end the rest."""


@runtime_checkable
class GeneratingEngine(Engine, Protocol):
    """Continues prompts; `AsyncEngine` in production."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield Admitted, deltas and ends of sequences, then RequestFinished."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text."""


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """Scores given targets; `AsyncEngine` in production."""

    async def score(self, request: ScoreRequest) -> Score:
        """Return the log-probabilities of the target's tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text."""


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


class Catalog:
    """Engines by name."""

    def __init__(self, engines: Mapping[str, Engine], replica_id: str) -> None:
        self.engines = dict(sorted(engines.items()))
        self.replica_id = replica_id

    def served(self, name: str) -> ServedModel:
        """Return what answers say of the model."""
        engine = self.engines[name]
        return ServedModel(
            name, engine.package, engine.capabilities, self.replica_id, engine.device
        )

    def generating(self, name: str, version: str) -> GeneratingEngine:
        """Return the engine of a generating model."""
        engine = self._find(name, version)
        if isinstance(engine, GeneratingEngine):
            return engine
        raise _cannot(name, engine, "generate")

    def scoring(self, name: str, version: str) -> ScoringEngine:
        """Return the engine of a model that scores."""
        engine = self._find(name, version)
        if isinstance(engine, ScoringEngine) and "score" in engine.capabilities:
            return engine
        raise _cannot(name, engine, "score")

    def predicting(self, name: str, version: str, capability: str) -> PredictingEngine:
        """Return the engine of a model that can "classify", "label" or "embed"."""
        engine = self._find(name, version)
        if isinstance(engine, PredictingEngine) and capability in engine.capabilities:
            return engine
        raise _cannot(name, engine, capability)

    def _find(self, name: str, version: str) -> Engine:
        if not name:
            raise InvalidRequest(
                [FieldViolation("model", f"no model is named; served here: {self._names()}")]
            )
        engine = self.engines.get(name)
        if engine is None:
            raise ModelNotFound(f"no model {name[:_MAX_ECHO]!a} here; served: {self._names()}")
        served = engine.package.manifest.version
        if version and version != served:
            raise ModelVersionNotFound(
                f"no version {version[:_MAX_ECHO]!a} of model {name}; "
                f"served: {served}; leave model_version empty for it"
            )
        return engine

    def _names(self) -> str:
        return ", ".join(self.engines) or "none"


def _cannot(name: str, engine: Engine, capability: str) -> CapabilityNotSupported:
    return CapabilityNotSupported(
        f"model {name} cannot {capability}; it can {', '.join(engine.capabilities)}", [capability]
    )
