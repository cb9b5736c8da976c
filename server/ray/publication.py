"""The publication of a service on its Ray cluster, by which gateways find its workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from server.auth.peers import Peers
from server.ray import internals
from server.ray.address import not_joined
from server.ray.claim import NAMESPACE
from server.ray.roster import RosterAddress


@dataclass(frozen=True)
class Publication:
    """The roster of a service's workers, and limits that follow from its settings, for gateways."""

    roster: RosterAddress
    max_request_bytes: int
    max_calls_per_worker: int

    def to_json(self) -> bytes:
        """Return it as `from_json` reads it."""
        fields = asdict(self)
        if (peers := self.roster.peers) is not None:
            fields["roster"]["peers"] = {"cert": peers.cert.decode(), "key": peers.key.decode()}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Publication:
        """Return what `to_json` has written; ValueError, TypeError, KeyError for anything else."""
        fields: dict[str, Any] = json.loads(data)
        roster = fields.pop("roster")
        if (peers := roster["peers"]) is not None:
            roster["peers"] = Peers(peers["cert"].encode(), peers["key"].encode())
        return cls(RosterAddress(**roster), **fields)


def publish(name: str, publication: Publication) -> None:
    """Tell it to gateways of the service of this name; the process is connected to the cluster."""
    internals.put(_key(name), publication.to_json(), NAMESPACE)


def withdraw(name: str) -> None:
    """Tell nothing any more."""
    internals.delete(_key(name), NAMESPACE)


def published(name: str) -> Publication | None:
    """Return what a service tells; the process is connected to the cluster."""
    return _read(internals.get(_key(name), NAMESPACE))


def published_at(ray_address: str, name: str) -> Publication | None:
    """Return what a service tells on the cluster at an address, of which this is no part.

    Raises OSError if the cluster does not answer.
    """
    import ray

    try:
        return _read(internals.get_at(ray_address, _key(name), NAMESPACE))
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise OSError(not_joined(ray_address, error)) from error


def _read(data: bytes | None) -> Publication | None:
    return None if data is None else Publication.from_json(data)


def _key(name: str) -> bytes:
    return f"service:{name}".encode()
