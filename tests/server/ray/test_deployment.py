"""Decisions and refusals of the deployment before, and without, any Ray; test_end_to_end has it."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Device
from engine.errors import ConfigError, EngineFailure, PackageError
from server.config import GatewayConfig, WorkerConfig, gateway_config, worker_config
from server.listening import check_ports_are_free
from server.packages.pinned import PinnedPackage
from server.ray.cluster import _start_ray, running_ray
from server.ray.deployment import LiveRequestsPolicy, actor_options
from server.ray.processes.local import LocalRay
from server.ray.resources import check_gpus, num_threads, resources, shortage
from server.ray.serving import serve_models
from server.settings import Engine, Limits, Listen, Packages, Settings, Tls
from tests.engine.test_distributions import install

CONFIG = Settings(packages=Packages({"model": Path("nowhere")}))


def test_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use.*--port"
        ):
            check_ports_are_free(("--port", "127.0.0.1", port))


def test_free_port_and_any_port_are_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    check_ports_are_free(("--port", "127.0.0.1", port))
    check_ports_are_free(("--port", "127.0.0.1", 0))


def test_one_port_for_two_is_refused_and_any_port_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    check_ports_are_free(("--port", "127.0.0.1", 0), ("--admin-port", "127.0.0.1", 0))
    with pytest.raises(ConfigError, match=f":{port}: Address already in use.*with --admin-port"):
        check_ports_are_free(("--port", "127.0.0.1", port), ("--admin-port", "127.0.0.1", port))


@pytest.mark.parametrize("host", ["203.0.113.1", "a..b"])
def test_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host}:0: .*; listen on an address of this machine"):
        check_ports_are_free(("--port", host, 0))


def test_missing_package_is_refused_before_ray_starts() -> None:
    with pytest.raises(PackageError, match="there is no nowhere"):
        serve_models(CONFIG, announce=lambda service: None)


def test_a_precision_that_a_cpu_does_not_compute_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest: Any = SimpleNamespace(target="cuda", precision="bf16", image=None)
    monkeypatch.setattr(
        "server.ray.deployment.pin", lambda place, key: PinnedPackage(place, "", manifest)
    )
    monkeypatch.setattr("server.ray.serving.running_ray", lambda config: pytest.fail("it starts"))
    config = Settings(Listen(port=0), packages=CONFIG.packages, engine=Engine(device="cpu"))

    with pytest.raises(PackageError, match="nowhere: onnxruntime has no kernels for bf16"):
        serve_models(config, announce=lambda service: None)


def test_a_package_for_a_gpu_is_refused_before_ray_starts_where_nothing_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest: Any = SimpleNamespace(target="cuda", precision="fp16", image=None)
    monkeypatch.setattr(
        "server.ray.deployment.pin", lambda place, key: PinnedPackage(place, "", manifest)
    )
    monkeypatch.setattr("engine.distributions._installed", lambda name: None)
    monkeypatch.setattr("server.ray.serving.running_ray", lambda config: pytest.fail("it starts"))

    with pytest.raises(ConfigError, match=r"onnxruntime-gpu is not installed.*--device cpu"):
        serve_models(
            dataclasses.replace(CONFIG, listen=Listen(port=0)), announce=lambda service: None
        )


@pytest.mark.parametrize(
    ("found", "message"),
    [({}, "Ray finds no GPU"), ({"GPU": 1.0}, "2 replicas want 1 GPUs each, and this machine")],
)
async def test_gpus_that_ray_does_not_find_are_missed_before_workers_wait_for_them(
    found: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.ray.cluster._start_ray", lambda config, local: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0, **found})

    with pytest.raises(ConfigError, match=message):
        async with running_ray(_replicas(2, 2).for_targets(["cuda"])):
            pass


async def test_a_cluster_that_is_not_joined_may_ask_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(**options: object) -> None:
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr("ray.init", refused)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)

        with pytest.raises(ConfigError, match=rf"at {address} .*Failed.* RAY_AUTH_TOKEN"):
            async with running_ray(CONFIG):
                pass


@pytest.mark.parametrize("joins", [False, True])
def test_ray_does_not_pack_the_current_folder_under_uv_run(
    joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"RAY_ADDRESS": "auto"})
    monkeypatch.setattr("ray.init", lambda **options: seen.update(os.environ))
    ours = SimpleNamespace(start=lambda config: None, address=lambda: "127.0.0.1:1")

    _start_ray(CONFIG, None if joins else ours)  # type: ignore[arg-type]

    assert seen["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"


def test_a_ray_that_does_not_start_is_told_by_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("server.ray.processes.local._COMMAND", "print('trying'); exit('no room')")
    ray = LocalRay(tmp_path)
    ray.start(CONFIG)

    with pytest.raises(EngineFailure, match="Ray does not start: no room$"):
        ray.address()
    ray.end()


async def test_nobody_waits_for_a_cluster_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray would try for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)

    with pytest.raises(ConfigError, match=rf"at {address} does not answer: .*refused"):
        async with running_ray(CONFIG):
            pass


def test_two_distributions_of_onnxruntime_are_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tmp_path, "onnxruntime", "onnxruntime-gpu")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(ConfigError, match="both installed"):
        serve_models(CONFIG, announce=lambda service: None)


def test_gateway_takes_requests_as_large_as_its_workers_take() -> None:
    config = dataclasses.replace(CONFIG, limits=Limits(max_request_bytes=5_000_000))

    assert gateway_config(config).max_request_bytes == 5_000_000


@pytest.mark.parametrize(
    ("most", "largest", "expected"),
    [
        (None, 10 << 20, (10 << 20) + (1 << 16)),
        (None, 1000, 1 << 20),
        (64 << 20, 1 << 25, 64 << 20),
    ],
)
def test_requests_have_room_for_the_largest_image(
    most: int | None, largest: int, expected: int
) -> None:
    limits = Limits(max_image_bytes=largest)
    if most is not None:
        limits = dataclasses.replace(limits, max_request_bytes=most)

    config = dataclasses.replace(CONFIG, limits=limits).with_room_for_images()

    assert worker_config(config, "h").max_request_bytes == expected
    assert gateway_config(config).max_request_bytes == expected


@pytest.mark.parametrize(("most", "largest"), [(5_000_000, 10 << 20), (1 << 20, 64 << 20)])
def test_images_that_no_request_has_room_for_are_refused_by_both_names(
    most: int, largest: int
) -> None:
    limits = Limits(max_image_bytes=largest, max_request_bytes=most)
    config = dataclasses.replace(CONFIG, limits=limits)

    message = rf"image_bytes \({largest}\) can never be reached, .*max_request_bytes is {most} "
    with pytest.raises(ConfigError, match=message):
        config.with_room_for_images()


def test_settings_reach_gateway_and_worker() -> None:
    config = Settings(
        listen=Listen(host="127.0.0.2", port=7, prefix_affinity=True, max_connection_age=9),
        limits=Limits(
            worker_wait=3.0,
            worker_keepalive_timeout=2.0,
            client_keepalive_timeout=60.0,
            contended_calls_per_worker=5,
            max_concurrent_calls=10_000,
            max_worker_calls=50,
            max_open_bytes=50_000_000,
        ),
        engine=Engine(max_num_seqs=8, health_period=4.0),
        tls=Tls(Path("cert"), Path("key")),
    )

    assert gateway_config(config) == GatewayConfig(
        host="127.0.0.2",
        port=7,
        worker_wait=3.0,
        worker_keepalive_timeout=2.0,
        client_keepalive_timeout=60.0,
        max_connection_age=9,
        max_calls_per_worker=17,
        contended_calls_per_worker=5,
        prefix_affinity=True,
        max_concurrent_calls=10_000,
        max_worker_calls=50,
        max_open_bytes=50_000_000,
        tls=Tls(Path("cert"), Path("key")),
    )
    assert worker_config(config, "127.0.0.3") == WorkerConfig(
        host="127.0.0.3",
        health_period=4.0,
        **vars(config.limits),
    )


def test_replicas_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))

    assert num_threads(CONFIG) == cores
    assert num_threads(_replicas(1, cores)) == 1
    assert num_threads(_replicas(1, 100 * cores)) == 1
    assert num_threads(dataclasses.replace(CONFIG, engine=Engine(num_threads=7))) == 7


def test_number_of_sequences_is_left_to_workers_on_a_gpu_only() -> None:
    config = dataclasses.replace(CONFIG, engine=Engine(max_num_seqs=0))

    assert config.for_targets(["cpu", "cuda"]).engine.max_num_seqs == 0
    assert gateway_config(config.for_targets(["cpu", "cuda"])).max_calls_per_worker == 256
    assert config.for_targets(["cpu"]).engine.max_num_seqs == 32
    assert gateway_config(config.for_targets(["cpu"])).max_calls_per_worker == 32


def test_a_device_that_a_package_was_not_made_for_is_refused_before_ray_starts() -> None:
    config = dataclasses.replace(CONFIG, engine=Engine(device="cuda"))

    with pytest.raises(ConfigError, match="export --target cuda"):
        config.for_targets(["cuda", "cpu"])


@pytest.mark.parametrize(
    ("given", "targets", "gpus"),
    [
        (None, ["cuda"], {"GPU": 1}),
        (None, ["cpu", "cuda"], {"GPU": 1}),
        (None, ["cpu"], {}),
        (0.5, ["cuda"], {"GPU": 0.5}),
        (1, ["cpu"], {"GPU": 1}),
    ],
)
def test_a_replica_has_a_gpu_where_a_model_runs_on_one(
    given: float | None, targets: list[Device], gpus: dict[str, float]
) -> None:
    config = CONFIG.with_engine(num_threads=3, num_gpus_per_replica=given)

    found = config.for_targets(targets)
    assert resources(found) == {"CPU": 3, **gpus}
    asked = actor_options(found, found.listen.name)
    assert asked == {"num_cpus": 3} | ({"num_gpus": gpus["GPU"]} if gpus else {})


def test_a_package_for_cuda_that_runs_on_a_cpu_has_no_gpu() -> None:
    config = dataclasses.replace(CONFIG, engine=Engine(num_threads=3, device="cpu"))

    assert resources(config.for_targets(["cuda"])) == {"CPU": 3}


def test_a_worker_on_a_gpu_without_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_gpus_per_replica \(0\) leaves the workers without"):
        CONFIG.with_engine(num_gpus_per_replica=0).for_targets(["cuda"])


@pytest.mark.parametrize(
    ("gpus", "targets", "share"),
    [
        (None, ["cuda"], 0.9),
        (1, ["cuda", "cpu"], 0.9),
        (0.5, ["cuda"], 0.45),
        (0.34, ["cuda"], 0.45),
        (0.3333333333, ["cuda"], 0.3),
        (0.33333334, ["cuda"], 0.3),  # Ray, too, lets three share a GPU
        (0.5, ["cuda", "cuda", "cuda"], 0.15),
    ],
)
def test_engines_on_one_gpu_divide_its_memory(
    gpus: float | None, targets: list[Device], share: float
) -> None:
    config = CONFIG.with_engine(num_gpus_per_replica=gpus).for_targets(targets)

    assert config.engine.gpu_memory_utilization == pytest.approx(share)


@pytest.mark.parametrize(
    ("replicas", "gpus", "on_machine", "message"),
    [
        (2, 1, 2, None),
        (4, 0.5, 2, None),
        (2, 0, 0, None),
        (1, 1, 0, "finds no GPU on this machine; .* --device cpu, a .* --precision fp16"),
        (2, 1, 1, "2 replicas want 1 GPUs each, and this machine has 1; .*--replicas"),
        (3, 0.6, 2, "3 replicas want 0.6 GPUs each, and this machine has 2"),
    ],
)
def test_replicas_that_never_get_their_gpus_are_refused(
    replicas: int, gpus: float, on_machine: int, message: str | None
) -> None:
    config = _replicas(replicas, replicas).with_engine(num_gpus_per_replica=gpus)

    if message is None:
        check_gpus(config, on_machine)
    else:
        with pytest.raises(ConfigError, match=message):
            check_gpus(config, on_machine)


def test_a_cluster_that_is_short_of_something_is_told_what() -> None:
    wanted, total = {"CPU": 2, "GPU": 0.5}, {"CPU": 8.0, "GPU": 1.0}

    assert shortage(2, wanted, {"CPU": 4.0, "GPU": 1.0}, total) is None
    assert shortage(0, wanted, {}, total) is None
    cores = shortage(2, wanted, {"CPU": 3.0, "GPU": 1.0}, total)
    assert cores is not None
    assert "2 more workers want 2 each, and of the 8 of the Ray cluster 3 are free" in cores
    assert "--replicas or --threads" in cores
    assert shortage(2, wanted, {"CPU": 4.0, "GPU": 0.5}, total) == (
        "waiting for GPUs: 2 more workers want 0.5 each, and of the 1 of the Ray cluster 0.5 are "
        "free; ask for fewer with --replicas or --num-gpus-per-replica, or let the cluster grow"
    )


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [({}, 1), ({"a": 3}, 1), ({"a": 8}, 1), ({"a": 9}, 2), ({"a": 9, "b": 8}, 3), ({"a": 99}, 4)],
)
def test_number_of_replicas_follows_the_live_requests(loads: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"live_requests": loads},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )

    assert LiveRequestsPolicy(target=8)(context) == (wanted, {})


def test_policy_keeps_to_the_minimum_before_any_metric() -> None:
    context = SimpleNamespace(
        aggregated_metrics=None, capacity_adjusted_min_replicas=2, capacity_adjusted_max_replicas=4
    )

    assert LiveRequestsPolicy(target=8)(context) == (2, {})


def test_a_worker_can_be_imported_without_torch_ray_and_what_is_for_cuda() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['ray'] = None\n"
        "import server.ray.serving, server.worker.worker, engine.factory, engine.session\n"
        "import engine.generation.async_engine, engine.one_pass.engine, engine.one_pass.image\n"
        "import engine.slots.runner, engine.slots.step_runner, engine.slots.warm_up\n"
        "print([name for name in sys.modules if name.startswith('engine.cuda')])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)

    assert done.stdout == "[]\n", done.stderr


def _replicas(low: int, high: int) -> Settings:
    return CONFIG.with_engine(min_replicas=low, max_replicas=high)
