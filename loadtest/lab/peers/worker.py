"""A process of its own for one engine: a line of JSON asks for work, a line answers.

`python -m loadtest.lab.peers.worker ADAPTER '{"directory": ..., "weights": ..., ...}'`
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Protocol

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class LoadOptions:
    """Options by which an adapter loads a model."""

    directory: str  # has the model in all its forms, see models.py
    weights: str
    num_threads: int
    max_concurrency: int
    max_tokens: int  # prompt and output together
    num_beams: int
    setting: Mapping[str, int]

    @classmethod
    def of(cls, text: str) -> LoadOptions:
        """Return the options as `to_json` writes them."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return them as an argument of a process."""
        return json.dumps(asdict(self))


class Adapter(Protocol):
    """An engine with a model in it."""

    versions: Mapping[str, str]

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Return exactly `num_new_tokens` tokens for every prompt, all prompts at once."""


def load_adapter(name: str, options: LoadOptions) -> Adapter:
    """Import the adapter's module, and with it its engine, and load the model."""
    module = importlib.import_module(name if "." in name else f"loadtest.lab.peers.adapters.{name}")
    adapter: Adapter = module.load(options)
    return adapter


def serve(adapter: Adapter, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more; the time is that of the engine alone."""
    for line in requests:
        request = json.loads(line)
        started = time.perf_counter()
        tokens = adapter.generate(request["prompts"], request["num_new_tokens"])
        seconds = time.perf_counter() - started
        _say(answers, {"seconds": seconds, "tokens": [list(map(int, row)) for row in tokens]})


def _say(answers: IO[str], answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main(arguments: Sequence[str]) -> int:
    """Load, say so, serve; what an engine prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        adapter = load_adapter(arguments[0], LoadOptions.of(arguments[1]))
        _say(answers, {"versions": dict(adapter.versions)})
        serve(adapter, sys.stdin, answers)
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
