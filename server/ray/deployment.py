"""The deployments of workers on Ray Serve: their number, resources and state."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from engine.factory import device_of
from server.packages.pinned import PinnedPackage, pin
from server.ray.address import joins_cluster
from server.ray.replica import WorkerReplica
from server.ray.resources import resources
from server.settings import Settings


class LiveRequestsPolicy:
    """Autoscaling policy of Ray Serve: so many live requests per replica.

    Ray pickles the class by value, so it uses nothing of this file.
    """

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that the load asks for, and no state."""
        load = sum((context.aggregated_metrics or {}).get("live_requests", {}).values())
        wanted = math.ceil(load / self._target)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}


def checked_packages(config: Settings) -> tuple[Mapping[str, PinnedPackage], Settings]:
    """Return what is served, and settings that have room for its requests.

    Raises ConfigError or PackageError for settings and packages that cannot be served.
    """
    models, key = config.packages.models, config.packages.require_signature
    packages = {model: pin(address, key) for model, address in models.items()}
    for one in packages.values():
        device_of(one.manifest, one.address, config.engine)
    if any(one.manifest.image for one in packages.values()):
        config = config.with_room_for_images()
    return packages, config


def deploy(
    config: Settings, service: str, packages: Mapping[str, PinnedPackage], name: str
) -> None:
    """Make Ray Serve run workers of a service under this name; return before they run.

    The service is given by its id.
    """
    from ray import serve

    deployment = serve.deployment(WorkerReplica, **worker_options(config, name))
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [
            serve.RunTarget(
                deployment.bind(config, service, packages, name), name=name, route_prefix=None
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def worker_options(config: Settings, name: str) -> dict[str, Any]:
    """Return the options of the deployment of workers under a name."""
    return {
        "name": "Worker",
        "health_check_period_s": 1,
        "health_check_timeout_s": 5,
        "graceful_shutdown_timeout_s": config.listen.grace + 10,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 2,
        "ray_actor_options": actor_options(config, name),
        **_scaling(config),
    }


def actor_options(config: Settings, name: str) -> dict[str, float]:
    """Return the resources that Ray gives each of these workers."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus"}
    wanted = resources(config)
    if name != config.listen.name and not joins_cluster():
        wanted["CPU"] = 0  # a Ray of our own has the cores of the first workers; they share them
    return {names[resource]: amount for resource, amount in wanted.items()}


def _scaling(config: Settings) -> dict[str, Any]:
    """Return the options of a deployment that say how many replicas it has."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    if config.engine.min_replicas == config.engine.max_replicas:
        return {"num_replicas": config.engine.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.engine.min_replicas,
            max_replicas=config.engine.max_replicas,
            upscale_delay_s=1,
            downscale_delay_s=config.engine.downscale_delay,
            metrics_interval_s=0.5,
            look_back_period_s=2,
            policy=AutoscalingPolicy(
                policy_function=LiveRequestsPolicy,
                policy_kwargs={"target": config.engine.target_live_requests},
            ),
        )
    }


def undeploy(names: Collection[str]) -> None:
    """Take away what `deploy` has made under these names; replicas drain."""
    import ray
    from ray import serve

    undeploy_soon(names)
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        for name in names:
            serve.delete(name)


def undeploy_soon(names: Collection[str]) -> None:
    """Begin to take it away; return before the replicas have drained."""
    import ray
    from ray import serve

    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        for name in names:
            serve.delete(name, _blocking=False)


def is_deployed(name: str) -> bool:
    """Return whether Ray Serve has workers under this name, some that end among them."""
    from ray import serve

    return name in serve.status().applications


def deployment_problem(name: str) -> str | None:
    """Return why Ray Serve has given up; None if it has not."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None or application.status != "DEPLOY_FAILED":
        return None
    messages = [d.message for d in application.deployments.values()] or [application.message]
    lines = [line.strip() for line in messages[0].splitlines() if line.strip()]
    # The end of a traceback: `module.Class: message`.
    return re.sub(r"^[\w.]+: ", "", lines[-1]) if lines else "Ray Serve gives no reason"
