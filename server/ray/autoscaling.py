"""How many workers Ray Serve keeps for how much load."""

from __future__ import annotations

import math
from typing import Any

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


def scaling(config: Settings) -> dict[str, Any]:
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
