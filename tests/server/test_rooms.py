"""Imports of the server's rooms: the modules that they bring into a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_HEAVY = {
    "PIL",
    "click",
    "llguidance",
    "numpy",
    "onnxruntime",
    "pydantic",
    "ray",
    "rich",
    "tokenizers",
    "torch",
}
_ROOMS_OF_THE_ENGINE = ("device", "generation", "one_pass", "package", "sampling", "scheduling")


def test_the_gateway_knows_no_worker_and_nothing_heavy() -> None:
    loaded = _modules_after("import server.gateway.gateway")

    assert not loaded & _HEAVY
    assert not {name for name in loaded if name.startswith(("server.worker", "server.ray"))}
    assert not loaded & {f"engine.{room}" for room in (*_ROOMS_OF_THE_ENGINE, "slots", "text")}


def test_a_gateway_that_asks_for_tokens_loads_nothing_heavy_either(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nsha256 = "{"a" * 64}"\ntenant = "acme"\n')
    code = (
        "from pathlib import Path; import server.gateway.gateway\n"
        "from server.auth.tokens import TokenFile\n"
        f"TokenFile(Path({str(tokens)!r}))"
    )

    assert not _modules_after(code) & _HEAVY


def test_a_worker_knows_no_gateway_and_no_ray() -> None:
    loaded = _modules_after("import server.worker.worker")

    assert not loaded & {"ray", "torch", "onnxruntime", "click", "rich"}
    assert not {name for name in loaded if name.startswith(("server.gateway", "server.ray"))}


def _modules_after(code: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has after the code."""
    tell = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))
