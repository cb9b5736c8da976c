"""An engine for tests of the workers: it counts on from the last token of a prompt."""

from __future__ import annotations

import sys

from loadtest.lab.peers.worker import LoadOptions, Prompts


class CountingAdapter:
    """Fails where the setting says so."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = {"counting": "1.0"}
        self._short = options.setting.get("short", 0)
        self._fails = options.setting.get("fails", 0)

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        print("engines talk on the standard output")
        if self._fails:
            raise ValueError("the engine is broken")
        length = num_new_tokens - self._short
        return [[prompt[-1] + 1 + i for i in range(length)] for prompt in prompts]


def load(options: LoadOptions) -> CountingAdapter:
    if options.weights == "lost":
        raise FileNotFoundError("no such weights")
    if options.setting.get("ends"):
        sys.exit("this engine has nothing to do")
    return CountingAdapter(options)
