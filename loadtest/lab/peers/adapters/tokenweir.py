"""Tokenweir itself: the engine of `tokenweir bench`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.config import EngineConfig
from engine.package.package import load_package
from loadtest.benchmark.engine_bench import EngineBench
from loadtest.benchmark.work import BenchmarkWork
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.origin import versions_of


class TokenweirAdapter:
    """An engine and the event loop that it lives on."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = versions_of("onnxruntime", "onnxruntime-gpu")
        self._num_beams = options.num_beams
        self._loop = asyncio.new_event_loop()
        self._bench = EngineBench.load(
            load_package(Path(options.directory) / f"tokenweir-{options.weights}"),
            max_num_seqs=options.max_concurrency * options.num_beams,
            settings=EngineConfig(num_threads=options.num_threads),
        )
        self._loop.run_until_complete(self._bench.start())

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Submit all prompts at once, and wait for the last."""
        work = BenchmarkWork(
            strategy="beam" if self._num_beams > 1 else "greedy", beam_width=self._num_beams
        )
        measured = self._loop.run_until_complete(
            self._bench.measure(
                [tuple(prompt) for prompt in prompts],
                lambda index: work.params(index, num_new_tokens),
            )
        )
        return [list(answer.token_ids) for answer in measured.answers]


load = TokenweirAdapter
