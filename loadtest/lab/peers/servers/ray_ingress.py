"""Ray Serve's own gRPC ingress around our engine: its proxy, then a replica."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tokenweir.v1 import generation_service_pb2 as pb

from engine.config import EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.package import load_package
from engine.requests.events import TextDelta
from engine.requests.request import GenerationRequest, SamplingParams
from loadtest.lab.peers.servers.launch import Launch, python_server
from loadtest.lab.peers.servers.token_stream import stream
from loadtest.lab.peers.worker import LoadOptions
from loadtest.origin import versions_of

_SERVICE = "tokenweir.v1.generation_service_pb2_grpc.add_GenerationServiceServicer_to_server"


class Ingress:
    """A deployment whose methods are those of the service."""

    def __init__(self, options: LoadOptions) -> None:
        self._engine = engine_of(options)
        self._start: asyncio.Task[None] | None = None
        self._num_requests = 0

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Answer a call; Ray Serve goes by the name."""
        if self._start is None:
            self._start = asyncio.create_task(self._engine.start())
        await self._start
        async for message in stream(request, self._generate):
            yield message

    async def _generate(self, prompt: Sequence[int], num_new: int) -> AsyncIterator[Sequence[int]]:
        self._num_requests += 1
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        request = GenerationRequest(str(self._num_requests), tuple(prompt), params)
        async for event in self._engine.generate(request):
            if isinstance(event, TextDelta) and event.token_ids:
                yield event.token_ids


def engine_of(options: LoadOptions) -> AsyncEngine:
    """Load the engine of the package of these weights, as a worker of ours does."""
    package = load_package(Path(options.directory) / f"tokenweir-{options.weights}")
    config = EngineConfig(max_num_seqs=options.max_concurrency, num_threads=options.num_threads)
    engine = load_engine(package, config)
    assert isinstance(engine, AsyncEngine), "it generates"
    return engine


def launch(options: LoadOptions, port: int) -> Launch:
    """Return the command that runs `main` here."""
    versions = versions_of("ray", "onnxruntime", "grpcio")
    return Launch(python_server(__name__, options, port), f"127.0.0.1:{port}", versions)


def main(options: str, port: str) -> None:
    """Serve until SIGTERM."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else `uv run` uploads the folder
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # waited for below
    asked = LoadOptions.of(options)
    local: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    ray.init(
        "local",
        num_cpus=asked.num_threads,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **local,
    )
    serve.start(grpc_options=gRPCOptions(port=int(port), grpc_servicer_functions=[_SERVICE]))
    deployment: Any = serve.deployment(max_ongoing_requests=2 * asked.max_concurrency)
    serve.run(deployment(Ingress).bind(asked))
    signal.sigwait(signals)
    serve.shutdown()
    ray.shutdown()
