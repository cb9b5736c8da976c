"""The models that a worker serves, found by what a request says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from engine.errors import (
    CapabilityNotSupported,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    ModelVersionNotFound,
)
from server.worker.answers import ServedModel
from server.worker.engines import Engine, GeneratingEngine, PredictingEngine

_MAX_ECHO = 64  # characters of a name that an error repeats
T = TypeVar("T", bound=Engine)


class Catalog:
    """Engines by name, all of them and by what they can."""

    def __init__(self, engines: Mapping[str, Engine], replica_id: str) -> None:
        self.engines = dict(sorted(engines.items()))
        self.replica_id = replica_id
        # Asked of a protocol once: it takes as long as all other checks of a request together.
        found = self.engines.items()
        self.generators = {n: e for n, e in found if isinstance(e, GeneratingEngine)}
        self.predictors = {n: e for n, e in found if isinstance(e, PredictingEngine)}

    def known(self, name: str) -> str:
        """Return the name if a model has it, else ""; what metrics are labelled with has an end."""
        return name if name in self.engines else ""

    def generating(
        self, name: str, version: str, capability: str = "generate"
    ) -> ServedModel[GeneratingEngine]:
        """Return a model that generates, or can "score"."""
        return self._able(self.generators, name, version, capability)

    def predicting(self, name: str, version: str, capability: str) -> ServedModel[PredictingEngine]:
        """Return a model that can "classify", "label" or "embed"."""
        return self._able(self.predictors, name, version, capability)

    def served(self, name: str, engine: T) -> ServedModel[T]:
        """Return the model of a name, with its engine."""
        return ServedModel(name, engine, engine.capabilities, self.replica_id)

    def _able(
        self, engines: Mapping[str, T], name: str, version: str, capability: str
    ) -> ServedModel[T]:
        engine = self._find(name, version)
        if (able := engines.get(name)) is not None and capability in engine.capabilities:
            return self.served(name, able)
        can = ", ".join(engine.capabilities)
        what = f"model {name} cannot {capability}; it can {can}"
        raise CapabilityNotSupported(what, [capability])

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
