"""Private names of Ray, which are replaced here: one that is gone is told with Ray's version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import ConfigError


@contextmanager
def private_names() -> Iterator[None]:
    """Raise ConfigError for a name that this Ray does not have."""
    try:
        yield
    except (ImportError, AttributeError, KeyError) as error:
        raise other_ray(str(error)) from error


def other_ray(difference: str) -> ConfigError:
    """Return what to raise about a Ray that is built in another way."""
    import ray

    return ConfigError(
        f"Ray {ray.__version__} is not built as Tokenweir replaces parts of it: {difference}; "
        "install a version that the extra `serve` allows"
    )
