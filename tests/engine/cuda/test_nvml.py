"""The driver's version: NVML's, or that of its CUDA if NVML says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cuda import nvml
from engine.cuda.device import driver_of
from engine.cuda.nvml import driver_version, open_nvml
from tests.engine.cuda.fake_cuda import FakeCuda


class FakeLibrary:
    def __init__(self, version: bytes, code: int = 0) -> None:
        self._version, self._code = version, code

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: object) -> int:
        text.value = self._version
        return self._code


@pytest.mark.parametrize("version", ["580.65.06", "580.95.05"])
def test_drivers_of_one_version_of_cuda_are_told_apart(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: FakeLibrary(version.encode()))

    assert driver_version() == driver_of(FakeCuda().runtime()) == version


def test_where_it_does_not_say_it_the_driver_is_known_by_its_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: FakeLibrary(b"", code=3))

    assert driver_version() is None
    assert driver_of(FakeCuda().runtime()) == "13.1"


def test_where_there_is_none_the_driver_is_known_by_its_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libthat-is-nowhere.so")

    assert open_nvml() is None
    assert driver_of(FakeCuda().runtime()) == "13.1"
