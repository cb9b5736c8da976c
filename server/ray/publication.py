"""The publication of a service on its Ray cluster, by which gateways find its workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from server.identity.peers import Peers
from server.ray.address import not_joined
from server.ray.claim import NAMESPACE
from server.ray.roster import RosterAddress

_TIMEOUT = 5.0  # seconds for an answer of Ray's table of keys


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
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(
        _key(name), publication.to_json(), overwrite=True, namespace=NAMESPACE
    )


def withdraw(name: str) -> None:
    """Tell nothing any more."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_key(name), namespace=NAMESPACE)


def published(name: str) -> Publication | None:
    """Return what a service tells; the process is connected to the cluster."""
    from ray.experimental import internal_kv

    return _read(internal_kv._internal_kv_get(_key(name), namespace=NAMESPACE))


def published_at(ray_address: str, name: str) -> Publication | None:
    """Return what a service tells on the cluster at an address, of which this is no part.

    Raises OSError if the cluster does not answer.
    """
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        client = GcsClient(address=ray_address)
        return _read(client.internal_kv_get(_key(name), NAMESPACE.encode(), timeout=_TIMEOUT))
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise OSError(not_joined(ray_address, error)) from error


def _read(data: bytes | None) -> Publication | None:
    return None if data is None else Publication.from_json(data)


def _key(name: str) -> bytes:
    return f"service:{name}".encode()
