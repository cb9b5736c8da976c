"""How a server of a comparison is started and asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from loadtest.lab.peers.worker import LoadOptions

MODEL = "peer"  # every server's name for its model
_FOLDER = "loadtest.lab.peers.servers"


@dataclass(frozen=True)
class Launch:
    """A server as it is started, and as the load test asks it."""

    command: tuple[str, ...]
    address: str  # "host:port", or the "http://host:port/v1" of OpenAI's protocol
    versions: Mapping[str, str]
    options: Mapping[str, JsonValue] = field(default_factory=dict)  # for every request


def launch(name: str, options: LoadOptions, port: int) -> Launch:
    """Return how a server is started, as its module says; raises what it raises without it."""
    module = importlib.import_module(name if "." in name else f"{_FOLDER}.{name}")
    found: Launch = module.launch(options, port)
    return found


def python_server(module: str, options: LoadOptions, port: int) -> tuple[str, ...]:
    """Return the command of a server of ours: `main` of a module, with options and port."""
    call = f"import sys; from {module} import main; main(*sys.argv[1:])"
    return (sys.executable, "-c", call, options.to_json(), str(port))
