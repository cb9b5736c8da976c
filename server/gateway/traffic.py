"""Which version of a model a call goes to: the one that it names, or by the shares of all."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from tokenweir.v1 import admin_service_pb2

from engine.errors import FieldViolation, InvalidRequest, ModelNotFound, ModelVersionNotFound

ALL = 100.0  # percent
_MAX_ECHO = 64  # characters of a name that an error repeats


class ModelVersion(NamedTuple):
    """A version of a model, as requests name it."""

    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.model} {self.version}"

    @classmethod
    def of(cls, info: admin_service_pb2.ModelInfo) -> ModelVersion:
        """Return which version a message speaks of."""
        return cls(info.model, info.model_version)


class Traffic:
    """The versions of all models, open or closed to new calls, and the shares of those open.

    Shares are percent of the calls that name no version. Those of a model are 100 together, while
    one of its versions is open. A call falls to a version by the hash of its request id: asked
    again it goes the same way, and calls of a version stay there when its share is raised.
    """

    def __init__(self) -> None:
        self._shares: dict[str, dict[str, float]] = {}  # the newest version of a model first
        self._closed: set[ModelVersion] = set()

    def update(self, versions: Iterable[ModelVersion]) -> None:
        """Take in the versions that serve; those that nobody has closed are open."""
        for one in sorted(versions):
            if one not in self._closed and one.version not in self._shares.get(one.model, {}):
                self.open(one)

    def close(self, one: ModelVersion) -> float:
        """Send a version no new calls; its share goes to the others. Return the share it had."""
        shares = self._shares.get(one.model, {})
        share = shares.pop(one.version, 0.0)
        self._closed.add(one)
        if shares:
            self._shares[one.model] = _scaled(shares, ALL)
        else:
            self._shares.pop(one.model, None)
        return share

    def open(self, one: ModelVersion, share: float = 0.0) -> None:
        """Send a version calls: those that name it, and its share; all if it is the only one."""
        self._closed.discard(one)
        others = _scaled(self._shares.get(one.model, {}), ALL - share)
        self._shares[one.model] = {one.version: share if others else ALL, **others}

    def set_share(self, one: ModelVersion, share: float) -> None:
        """Give an open version a share; the others have the rest, in the proportions they had.

        Raises NotFound if it is not open, InvalidRequest for a share that it cannot have.
        """
        shares = self._shares.get(one.model, {})
        if one.version not in shares:
            self.refuse(one)
        check_share(share)
        if len(shares) == 1 and share != ALL:
            what = f"{share:g} leaves calls without a version: {one} is the only one that serves"
            raise InvalidRequest([FieldViolation("share", what)])
        others = {version: old for version, old in shares.items() if version != one.version}
        scaled = _scaled(others, ALL - share)
        self._shares[one.model] = {v: scaled.get(v, share) for v in shares}

    def forget(self, one: ModelVersion) -> None:
        """Forget a version."""
        self.close(one)
        self._closed.discard(one)

    def state(self) -> dict[str, Any]:
        """Return all of it for other gateways, as JSON has it; see `apply`."""
        closed = [list(one) for one in sorted(self._closed)]
        return {"shares": {model: {**s} for model, s in self._shares.items()}, "closed": closed}

    def apply(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another one; ValueError, TypeError or KeyError for no state."""
        closed = {ModelVersion(str(model), str(version)) for model, version in state["closed"]}
        self._shares = {
            str(model): {str(version): float(share) for version, share in shares.items()}
            for model, shares in dict(state["shares"]).items()
        }
        self._closed = closed

    def is_open(self, one: ModelVersion) -> bool:
        """Return whether a version takes new calls."""
        return one.version in self._shares.get(one.model, {})

    def share(self, one: ModelVersion) -> float:
        """Return the percent of the calls without a version that a version takes."""
        return self._shares.get(one.model, {}).get(one.version, 0.0)

    def taking(self, served: Collection[ModelVersion]) -> set[ModelVersion]:
        """Return which of those that serve get the calls without a version: `candidates` says."""
        open_ones = {one for one in served if self.is_open(one)}
        with_share = {one for one in open_ones if self.share(one)}
        covered = {one.model for one in with_share}
        return with_share | {one for one in open_ones if one.model not in covered}

    def versions(self, model: str) -> tuple[ModelVersion, ...]:
        """Return the open versions of a model, the newest first."""
        return tuple(ModelVersion(model, version) for version in self._shares.get(model, {}))

    def candidates(self, model: str, version: str, key: bytes) -> tuple[ModelVersion, ...]:
        """Return the versions that may answer a call, the one that it falls to first.

        A call that names one has no other. None of a model that is not open.
        """
        shares = self._shares.get(model, {})
        if version:
            return (ModelVersion(model, version),) if version in shares else ()
        if len(shares) == 1:
            return (ModelVersion(model, next(iter(shares))),)
        chosen = _chosen(shares, model, key)
        by_share = sorted(shares, key=lambda one: (one != chosen, -shares[one]))
        return tuple(ModelVersion(model, one) for one in by_share)

    def is_closed(self, one: ModelVersion) -> bool:
        """Return whether a known version, or without one a model, takes no new calls."""
        if one.version:
            return one in self._closed
        return one.model not in self._shares and any(c.model == one.model for c in self._closed)

    def refuse(self, one: ModelVersion) -> NoReturn:
        """Raise NotFound for a version, or a model, that is not open."""
        model, version = (text[:_MAX_ECHO] for text in one)
        if (shares := self._shares.get(one.model)) is None:
            names = ", ".join(sorted(self._shares)) or "none"
            raise ModelNotFound(f"no model {model!a} here; served: {names}")
        raise ModelVersionNotFound(
            f"no version {version!a} of model {model}; served: {', '.join(sorted(shares))}; "
            "leave model_version empty for any of them"
        )


def check_share(share: float) -> None:
    """Raise InvalidRequest for a share that is no percentage."""
    if not 0 <= share <= ALL:
        what = f"{share:g} must be 0 to 100, percent of the calls that name no version"
        raise InvalidRequest([FieldViolation("share", what)])


def _chosen(shares: Mapping[str, float], model: str, key: bytes) -> str | None:
    """Return the version that a call falls to."""
    digest = hashlib.blake2b(key, digest_size=8, person=model.encode()[:16]).digest()
    place = int.from_bytes(digest) / 2**64 * ALL
    for version, share in shares.items():
        if place < share:
            return version
        place -= share
    return None  # by rounding: then the largest


def _scaled(shares: Mapping[str, float], total: float) -> dict[str, float]:
    """Return shares in the same proportions that make a total; equal ones if all are 0."""
    before = sum(shares.values())
    if not before:
        return dict.fromkeys(shares, total / len(shares)) if shares else {}
    return {version: share * total / before for version, share in shares.items()}
