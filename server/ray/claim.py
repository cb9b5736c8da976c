"""The name of a service on a cluster: its holder, and the end of one without a holder."""

from __future__ import annotations

import logging
import time
from typing import Any

from engine.errors import ConfigError

NAMESPACE = "tokenweir"
_PATIENCE = 5.0  # seconds
logger = logging.getLogger(__name__)


class _Claim:
    """Holds the name of a service on a cluster; Ray ends it with the command that made it."""


def claim_name(name: str) -> Any:
    """Return what holds the name as long as it is held itself.

    Raises ConfigError if another command has the name; one that was killed has it for a moment.
    """
    import ray

    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return ray.remote(num_cpus=0)(_Claim).options(name=name).remote()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"a service named {name!r} runs on this Ray cluster already; "
                    "choose another name with --name"
                ) from error
        time.sleep(0.5)


def undeploy_if_abandoned(name: str, group: str) -> None:
    """Take away workers of a service whose name nobody holds.

    Ray ends the claim of a command that ends. Called in a replica, which holds the name meanwhile:
    what a new command of that name deploys stays.
    """
    import ray
    from ray import serve

    held = {"name": name, "namespace": NAMESPACE}
    if held in ray.util.list_named_actors(all_namespaces=True):
        return
    try:
        claim = ray.remote(num_cpus=0)(_Claim).options(name=name, namespace=NAMESPACE).remote()
    except ValueError:  # its command lives, or another has the name
        return
    logger.error("the command that serves %s is gone; its workers end", name)
    serve.delete(group, _blocking=False)
    del claim
