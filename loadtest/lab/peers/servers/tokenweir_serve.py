"""`tokenweir serve` itself: gateway and one worker under Ray."""

from __future__ import annotations

from pathlib import Path

from loadtest.lab.peers.servers.launch import MODEL, Launch
from loadtest.lab.peers.worker import LoadOptions
from loadtest.lab.serve import SERVE
from loadtest.origin import versions_of


def launch(options: LoadOptions, port: int) -> Launch:
    """Return the command that serves the package of these weights."""
    package = Path(options.directory) / f"tokenweir-{options.weights}"
    command = [*SERVE, "--model", f"{MODEL}={package}", "--port", str(port)]
    command += ["--threads", str(options.num_threads)]
    command += ["--max-num-seqs", str(options.max_concurrency)]
    versions = versions_of("onnxruntime", "grpcio", "ray")
    return Launch(tuple(command), f"127.0.0.1:{port}", versions)
