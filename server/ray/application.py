"""The workers of a service as an application that Ray Serve runs by itself, with no command.

`serve deploy` and a RayService of KubeRay name `server.ray.application:app_builder`, and give it
settings, in the sections that the file of `tokenweir serve --config` has. `tokenweir gateway`
answers calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from server.given_settings import GivenSettings
from server.ray.deployment import checked_packages, worker_options
from server.ray.replica import WorkerReplica
from server.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application


def app_builder(args: Mapping[str, Any]) -> Application:
    """Return the application with these settings; Ray Serve calls it on the cluster.

    Raises ConfigError or PackageError for settings and packages that cannot be served.
    """
    from ray import serve

    packages, config = checked_packages(config_of(args))
    config = config.for_targets([one.manifest.target for one in packages.values()])
    worker = serve.deployment(WorkerReplica, **worker_options(config, config.listen.name))
    return worker.bind(config, None, packages, config.listen.name)


def config_of(args: Mapping[str, Any]) -> Settings:
    """Return the settings; ConfigError for those that there are not, or that are out of bounds."""
    given = GivenSettings()
    given.take(args, "args of the application", Path.cwd())
    if not given["packages.models"].value:
        raise ConfigError("args of the application name no package; give packages.models")
    return given.served()
