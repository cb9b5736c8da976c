"""An engine for tests of the workers: it counts on from the last token of a prompt."""

from __future__ import annotations

from loadtest.lab.peers.worker import LoadOptions, Prompts


class CountingAdapter:
    """Fails where the setting says so."""

    def __init__(self, options: LoadOptions) -> None:
        self.versions = {"counting": "1.0"}
        self._short = options.setting.get("short", 0)

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        print("engines talk on the standard output")
        if prompts[0][0] < 0:
            raise ValueError("no token is negative")
        length = num_new_tokens - self._short
        return [[prompt[-1] + 1 + i for i in range(length)] for prompt in prompts]


def load(options: LoadOptions) -> CountingAdapter:
    if options.weights == "lost":
        raise FileNotFoundError("no such weights")
    return CountingAdapter(options)
