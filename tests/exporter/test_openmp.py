"""Commands set up OpenMP; an import of a name does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from exporter.openmp import configure_openmp


def test_an_import_leaves_the_environment_as_it_is() -> None:
    without = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = "import os, exporter; print(os.environ.get('OMP_WAIT_POLICY'))"

    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("None\n", "")


def test_threads_of_a_command_soon_sleep_unless_a_policy_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    configure_openmp()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == ("ACTIVE", None)

    monkeypatch.delenv("OMP_WAIT_POLICY")
    configure_openmp()

    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "3000")


@pytest.mark.parametrize(("quota", "threads"), [(None, None), (1.5, "2"), (4.0, None)])
def test_torch_has_as_many_threads_as_the_cpu_quota_has_time_for(
    quota: float | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("engine.machine._cpu_quota", lambda: quota)

    configure_openmp()

    assert os.environ.get("OMP_NUM_THREADS") == threads
