"""A server for tests of the comparison: it counts on from the last token of a prompt."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from loadtest.lab.peers.servers.ctranslate_grpc import Batches, Told, serve
from loadtest.lab.peers.servers.launch import Launch, python_server
from loadtest.lab.peers.worker import LoadOptions


def launch(options: LoadOptions, port: int) -> Launch:
    if options.weights == "lost":
        raise FileNotFoundError("no such weights")
    return Launch(python_server(__name__, options, port), f"127.0.0.1:{port}", {"counting": "1.0"})


def main(options: str, port: str) -> None:
    """Fail, or answer too little, where the setting says so."""
    setting = LoadOptions.of(options).setting
    if setting.get("ends"):
        sys.exit("this server has nothing to do")

    def count(prompts: Sequence[Sequence[int]], num_new: int, tell: Told) -> None:
        if setting.get("fails") and num_new > 1:
            raise RuntimeError("the engine is broken")
        for step in range(num_new - setting.get("short", 0) * (num_new > 1)):
            for place, prompt in enumerate(prompts):
                tell(place, prompt[-1] + 1 + step)

    batches = Batches(count, max_batch=4, pause=0.001)
    asyncio.run(serve(batches, 1, int(port), asyncio.Event().wait()))
