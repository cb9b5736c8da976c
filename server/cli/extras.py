"""Extras that a command needs beyond a plain `pip install tokenweir`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from server.cli.exit_codes import NOT_USABLE, CommandError

# Modules of an extra, first the one that shows whether it is installed; for `gpu` as `cpu`.
_MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "serve": ("ray", "uvloop"),
        "cpu": ("onnxruntime",),
        "http": ("uvicorn", "starlette", "pydantic"),
        "export": ("torch", "onnx", "onnxscript", "safetensors", "sklearn"),
        "import": ("transformers", "huggingface_hub"),
        "otel": ("opentelemetry",),
        "loadtest": ("numpy", "pydantic", "matplotlib", "jinja2", "aiohttp"),
    }
)


def check_extras(*extras: str) -> None:
    """Raise CommandError, one line that names the extras, if one of them is not installed."""
    for extra in extras:
        module = _MODULES[extra][0]
        if find_spec(module) is None:
            raise CommandError(_how_to_install(module, extras), NOT_USABLE)


def needs(*extras: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """End the command in one line that names the extras, before it does anything without them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def checked(*arguments: Any, **options: Any) -> Any:
            check_extras(*extras)
            return command(*arguments, **options)

        return checked

    return decorate


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """Return how to install the module that is missing; None if no extra brings it."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in _MODULES.items() if name in modules), None)
    return None if extra is None else _how_to_install(name, [extra])


def _how_to_install(module: str, extras: Iterable[str]) -> str:
    wanted = f"tokenweir[{','.join(extras)}]"
    gpu = f", or for a GPU '{wanted.replace('cpu', 'gpu')}'" if "cpu" in extras else ""
    return f"this command needs {module}; install it with: pip install '{wanted}'{gpu}"
