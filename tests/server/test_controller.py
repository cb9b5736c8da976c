"""The controller of Ray Serve that a Ray of our own has; nothing of Ray runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from server.ray.controller import frugal_controller

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray warns


class _Plain:
    """Started in the place of Ray's own class."""

    async def __init__(self, *, size: int) -> None:  # type: ignore[misc]  # Ray awaits it
        self.size = size


async def test_applications_of_one_name_share_a_class_of_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray import cloudpickle
    from ray.serve._private import api, controller, default_impl, deployment_info

    info = deployment_info.DeploymentInfo
    monkeypatch.setattr(info, "actor_def", info.actor_def)  # as it was, behind the test
    monkeypatch.setattr(controller, "ServeController", _Plain)
    monkeypatch.setattr("server.ray.controller.M_ARENA_MAX", 0)  # none

    with frugal_controller():
        made = api.get_controller_impl()
    pickled = cloudpickle.dumps(made.__ray_metadata__.modified_class)
    kind = cloudpickle.loads(pickled)
    started = kind.__new__(kind)
    await started.__init__(size=3)

    first, again, other = (info.actor_def.fget(SimpleNamespace(actor_name=n)) for n in "aab")
    assert controller.ServeController is _Plain
    assert api.get_controller_impl is default_impl.get_controller_impl
    assert started.size == 3
    assert first is again
    assert first is not other
    assert first.__ray_metadata__.class_name == "a"


def test_a_controller_is_pickled_with_the_name_of_rays_own_and_no_copy() -> None:
    from ray import cloudpickle
    from ray.serve._private import api

    def pickled() -> bytes:
        made = api.get_controller_impl()
        found: bytes = cloudpickle.dumps(made.__ray_metadata__.modified_class)
        return found

    plain = pickled()
    with frugal_controller():
        assert len(pickled()) < len(plain) + 8192


@pytest.mark.parametrize("missing", ["api.get_controller_impl", "controller.ServeController"])
def test_another_ray_that_has_no_such_names_starts_its_own_controller(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"ray.serve._private.{missing}")

    with frugal_controller():
        pass


@pytest.mark.parametrize("missing", ["deployment_info.DeploymentInfo", "replica.ReplicaActor"])
async def test_a_controller_of_another_ray_starts_as_it_is(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import cloudpickle
    from ray.serve._private import api, controller, deployment_info

    info = deployment_info.DeploymentInfo
    monkeypatch.setattr(info, "actor_def", own := info.actor_def)
    monkeypatch.setattr(controller, "ServeController", _Plain)
    monkeypatch.setattr("server.ray.controller.M_ARENA_MAX", 0)  # none
    with frugal_controller():
        made = api.get_controller_impl()
    kind = cloudpickle.loads(cloudpickle.dumps(made.__ray_metadata__.modified_class))
    monkeypatch.delattr(f"ray.serve._private.{missing}")

    started = kind.__new__(kind)
    await started.__init__(size=3)

    assert started.size == 3
    assert info.actor_def is own
