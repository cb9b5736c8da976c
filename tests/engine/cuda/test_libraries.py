"""The libraries of CUDA: what is missing is told; onnxruntime would go on without."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from engine.cuda import libraries
from engine.errors import DeviceError

MISSING = ("libcublas.so.13", "libcurand.so.10")


def test_all_that_are_missing_are_named_with_what_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: list[object] = []

    def preload(*, cudnn: bool) -> None:
        wanted.append(cudnn)
        print("as onnxruntime does of each that it does not find")

    def load(name: str) -> None:
        wanted.append(name)
        if name in MISSING:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(libraries, "check_cuda_distribution", lambda: None)
    monkeypatch.setattr("onnxruntime.preload_dlls", preload)
    monkeypatch.setattr(ctypes, "CDLL", load)

    with pytest.raises(DeviceError) as caught:
        libraries.load_cuda_libraries()

    assert wanted == [False, "libcudart.so.13", "libcublasLt.so.13", *MISSING]
    why = "; ".join(f"{name}: cannot open shared object file" for name in MISSING)
    message = f"libraries of CUDA that cannot be loaded: {why}; pip install 'tokenweir[gpu]'"
    assert str(caught.value).endswith(message)
    assert capsys.readouterr().out == ""


def test_libraries_of_packages_that_are_installed_elsewhere_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in MISSING:
        (folder / name).touch()
    loaded: list[str] = []

    def load(name: str) -> None:
        if name in MISSING:
            raise OSError(f"{name}: cannot open shared object file")
        loaded.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "check_cuda_distribution", lambda: None)
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda *, cudnn: None)
    monkeypatch.setattr(ctypes, "CDLL", load)

    libraries.load_cuda_libraries()

    others = ["libcudart.so.13", "libcublasLt.so.13"]
    assert loaded == [*others, *(str(folder / name) for name in MISSING)]
