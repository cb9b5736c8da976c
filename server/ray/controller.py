"""The controller of Ray Serve that a Ray of our own has: models may come and go there for long."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

M_ARENA_MAX = -8  # for mallopt, in <malloc.h>


@contextmanager
def frugal_controller() -> Iterator[None]:
    """Have Ray Serve start a controller that keeps one class of actors a name, and one arena.

    It makes a class for every application that is deployed, also under a name that it had before,
    and keeps each, as Ray's server does. In an arena of its own every thread keeps what it has
    freed; an environment that says so would be that of the workers, too. A Ray that does not have
    these names starts its own controller, which keeps more.
    """
    try:
        from ray.serve._private import api, controller

        before, plain = api.get_controller_impl, controller.ServeController
    except (ImportError, AttributeError) as error:
        logger.warning("the controller of this Ray keeps what has gone: %s", error)
        yield
        return

    def get_controller_impl(**options: Any) -> Any:
        controller.ServeController = _frugal(plain)
        try:
            return before(**options)
        finally:
            controller.ServeController = plain  # or it would be pickled by value, too

    api.get_controller_impl = get_controller_impl
    try:
        yield
    finally:
        api.get_controller_impl = before


def _frugal(plain: type[Any]) -> type[Any]:
    """Return a class of controllers; Ray pickles it by value."""
    arena_max = M_ARENA_MAX

    def keep_less() -> None:
        import ctypes
        import functools

        import ray
        from ray.serve._private.deployment_info import DeploymentInfo
        from ray.serve._private.replica import ReplicaActor

        @functools.cache
        def actor_class(name: str) -> Any:
            return ray.remote(type(name, (ReplicaActor,), dict(ReplicaActor.__dict__)))

        def actor_def(info: Any) -> Any:
            return actor_class(info.actor_name)

        DeploymentInfo.actor_def = property(actor_def)
        ctypes.CDLL(None).mallopt(arena_max, 1)

    async def start(self: Any, *args: Any, **options: Any) -> None:
        import contextlib

        with contextlib.suppress(ImportError, AttributeError):  # another Ray has no such names
            keep_less()
        await plain.__init__(self, *args, **options)

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": "__main__"})
