"""Resources that the workers need of their machines, and those that are missing."""

from __future__ import annotations

from collections.abc import Mapping

from engine.distributions import ON_CPU
from engine.errors import ConfigError
from engine.machine import num_cores
from server.ray.address import joins_cluster
from server.settings import Settings


def num_threads(config: Settings) -> int:
    """Return the threads of one replica's engines: its share of the cores unless given."""
    return config.engine.num_threads or max(1, num_cores() // config.engine.max_replicas)


def resources(config: Settings) -> dict[str, float]:
    """Return what Ray reserves for one replica, by Ray's own names."""
    gpus = {"GPU": config.engine.num_gpus_per_replica} if config.engine.num_gpus_per_replica else {}
    return {"CPU": num_threads(config), **gpus}


def check_gpus(config: Settings, num_gpus: int) -> None:
    """Raise ConfigError if the least number of replicas does not fit on so many GPUs."""
    gpus, replicas = config.engine.num_gpus_per_replica, config.engine.min_replicas
    if not gpus or replicas <= num_gpus * config.replicas_per_gpu:
        return
    if not num_gpus:
        raise ConfigError(f"Ray finds no GPU on this machine; {ON_CPU}")
    raise ConfigError(
        f"{replicas} replicas want {gpus:g} GPUs each, and this machine has {num_gpus}; "
        "ask for fewer with --replicas, or let several share one, such as two with "
        "--num-gpus-per-replica 0.5"
    )


def check_gpus_of_cluster(config: Settings) -> None:
    """Raise ConfigError if a Ray of our own has too few GPUs for the workers: it gets no more."""
    import ray

    if config.engine.num_gpus_per_replica and not joins_cluster():
        check_gpus(config, int(ray.cluster_resources().get("GPU", 0)))


def shortage(
    num_workers: int,
    wanted: Mapping[str, float],
    free: Mapping[str, float],
    total: Mapping[str, float],
) -> str | None:
    """Return what is missing for so many workers that want so much each; None if nothing is."""
    words = {"CPU": ("cores", "--threads"), "GPU": ("GPUs", "--num-gpus-per-replica")}
    for resource, amount in wanted.items():
        if free.get(resource, 0) >= num_workers * amount:
            continue
        what, option = words[resource]
        return (
            f"waiting for {what}: {num_workers} more workers want {amount:g} each, and of the "
            f"{total.get(resource, 0):g} of the Ray cluster {free.get(resource, 0):g} are free; "
            f"ask for fewer with --replicas or {option}, or let the cluster grow"
        )
    return None


def shortage_now(num_workers: int, config: Settings) -> str | None:
    """Return what Ray lacks for so many workers that have no process; None if nothing.

    A Ray of our own has as many cores as it is asked for.
    """
    import ray

    wanted = resources(config)
    if not joins_cluster():
        del wanted["CPU"]
    return shortage(num_workers, wanted, ray.available_resources(), ray.cluster_resources())
