"""An engine in a process of its own, see worker.py."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from loadtest.errors import LoadTestError
from loadtest.lab.line_process import LineProcess
from loadtest.lab.peers.comparison import Answered, Loop
from loadtest.lab.peers.worker import LoadOptions, Prompts
from loadtest.work.ask import Answer


class EngineProcess:
    """One engine; LoadTestError says that it cannot be loaded here, or failed."""

    def __init__(self, adapter: str, options: LoadOptions, log: Path) -> None:
        module = "loadtest.lab.peers.worker"
        command = [sys.executable, "-m", module, adapter, options.to_json()]
        self._process = LineProcess(command, log=log)
        try:
            self.versions: Mapping[str, str] = self._process.read()["versions"]
        except LoadTestError:
            self.close()
            raise

    def ask(self, loop: Loop) -> Answered:
        """Run batches of requests, and between them as many prompts with one new token each."""
        draw = random.Random(loop.seed)

        def prompts() -> Prompts:  # never the same twice: what is kept of one must not help another
            one = range(loop.num_prompt_tokens)
            return [[draw.randrange(loop.vocab_size) for _ in one] for _ in range(loop.concurrency)]

        alone, whole = list[float](), list[float]()
        answers = list[Answer]()
        for _ in range(loop.num_requests // loop.concurrency):
            alone.append(self._generate(prompts(), 1)[0])
            seconds, tokens = self._generate(prompts(), loop.num_new_tokens)
            whole.append(seconds)
            answers += [{"token_ids": list(row)} for row in tokens]
        first, num_later = statistics.median(alone), loop.num_new_tokens - 1
        later = (statistics.median(whole) - first) / num_later if num_later else None
        return Answered(sum(whole), first, later, tuple(answers))

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _generate(self, prompts: Prompts, num_new_tokens: int) -> tuple[float, list[list[int]]]:
        """Return the seconds of a batch, and its tokens by prompt."""
        asked = {"prompts": prompts, "num_new_tokens": num_new_tokens}
        answer = self._process.ask(asked)
        tokens = answer["tokens"]
        lengths = {len(row) for row in tokens}
        if len(tokens) != len(prompts) or lengths != {num_new_tokens}:
            raise LoadTestError(
                f"asked for {len(prompts)} times {num_new_tokens} tokens, "
                f"got {len(tokens)} times {sorted(lengths)}"
            )
        return answer["seconds"], tokens
