"""NVML, by which a driver tells of itself and of its GPUs; it may be missing beside a GPU."""

from __future__ import annotations

import ctypes

_LIBRARY = "libnvidia-ml.so.1"
_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


def open_nvml() -> ctypes.CDLL | None:
    """Return the library, ready for calls; None where there is none, or it finds no driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def driver_version() -> str | None:
    """Return the version of the driver, as "580.65.06"; None where NVML does not say it."""
    library = open_nvml()
    if library is None:
        return None
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    if library.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_VERSION_BYTES)):
        return None
    return version.value.decode(errors="replace") or None
