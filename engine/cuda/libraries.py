"""The libraries of CUDA that pip has installed, loaded as onnxruntime wants to find them."""

from __future__ import annotations

import contextlib
import ctypes
import io
from importlib.util import find_spec
from pathlib import Path

from engine.distributions import check_cuda_distribution
from engine.errors import DeviceError
from engine.wording import listed

_ERRORS_ONLY = 3
# Libraries that onnxruntime's provider for CUDA is linked to.
_CUDA_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10")


def load_cuda_libraries() -> None:
    """Load the libraries of CUDA that pip has installed, before any is asked for by its name.

    Raises ConfigError if the onnxruntime that is installed is not the one for CUDA, DeviceError if
    a library that it needs is missing: onnxruntime would go on without the device.
    """
    check_cuda_distribution()
    import onnxruntime as ort

    ort.set_default_logger_severity(_ERRORS_ONLY)  # every session would warn that it has no plugin
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        ort.preload_dlls(cudnn=False)  # no graph of ours needs it
    missing = []
    for name in _CUDA_LIBRARIES:
        try:
            _load(name)
        except OSError as error:
            missing.append(error)
    if missing:
        raise DeviceError(
            f"onnxruntime {ort.__version__} needs libraries of CUDA that cannot be loaded: "
            f"{listed(missing, '; ')}; pip install 'tokenweir[gpu]'"
        )


def _load(name: str) -> None:
    """Load a library that is loaded, on the loader's path, or of an `nvidia` package anywhere.

    onnxruntime looks beside itself alone, and may be installed elsewhere. OSError: there is none.
    """
    try:
        ctypes.CDLL(name)
    except OSError:
        found = find_spec("nvidia")
        folders = found.submodule_search_locations if found else None
        paths = sorted(path for one in folders or () for path in Path(one).glob(f"*/lib/{name}"))
        if not paths:
            raise
        ctypes.CDLL(str(paths[0]))
