"""Which distribution of onnxruntime is installed: that for CPUs, or that for CUDA.

Both hold the module `onnxruntime`. This looks at what pip has written down and imports neither.
"""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from engine.errors import ConfigError

# How a package for CUDA is served without a GPU.
ON_CPU = (
    "without a GPU, serve with --device cpu, a package in bf16 once it is exported with "
    "--precision fp16"
)
_CPU, _CUDA = "onnxruntime", "onnxruntime-gpu"


def check_distributions() -> None:
    """Raise ConfigError if one has overwritten files of the other, which loads or not by chance."""
    cpu, cuda = _installed(_CPU), _installed(_CUDA)
    if cpu is None or cuda is None or _place(cpu) != _place(cuda):
        return
    raise ConfigError(
        f"{_CPU} {cpu.version} and {_CUDA} {cuda.version} are both installed in {_place(cuda)}, "
        "where each has overwritten files of the other; type these two lines, the second with cpu "
        "instead of gpu on a machine without a GPU:\n"
        f"pip uninstall --yes {_CPU} {_CUDA}\n"
        "pip install 'tokenweir[gpu]'"
    )


def check_cuda_distribution() -> None:
    """Raise ConfigError unless the distribution for CUDA is installed, and alone."""
    check_distributions()
    if _installed(_CUDA) is None:
        raise ConfigError(
            f"{_CUDA} is not installed, and {_CPU} knows no CUDA; {ON_CPU}; with one, type these "
            "two lines:\n"
            f"pip uninstall --yes {_CPU}\n"
            "pip install 'tokenweir[gpu]'"
        )


def cuda_version() -> str:
    """Return the version of the distribution for CUDA, which is installed."""
    found = _installed(_CUDA)
    assert found is not None, "no device was opened without it"
    return found.version


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _place(found: Distribution) -> Path:
    return Path(str(found.locate_file("onnxruntime"))).resolve()
