"""The parts of the check in the order in which they are worth most on the first day with a GPU.

Nothing of ours has run on one. First comes what is least certain and decides most: that anything
computes, that rows are right and bit-equal, that certificates hold; then a few times.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from loadtest.lab.gpu.part import Outcome, Part, Settings

# Name, "kind.model.format".
_NAMES = (
    "machine",
    "rows.gpt2.fp16",
    "rows.llama.bf16",
    "rows.marian.fp16",
    "certificate.gpt2.fp16",
    "certificate.dates.fp16",
    "certificate.llama.bf16",
    "bench.gpt2-124m.fp16",
    "served.gpt2-124m.fp16",
    "certificate.marian.fp16",
    "certificate.gpt2.fp16.int4",
    "certificate.llama.fp16.kv-int8",
    # in a second call, mostly
    "speed.gpt2-124m.fp16",
    "bench.llama-1b.bf16",
    "bench.gpt2-124m.fp16.one-bucket",
    "bench.gpt2-124m.fp16.topk",
    "bench.marian-base.fp16",
    "certificate.digits.fp16",
    "speed.llama-1b.bf16",
    "speed.marian-base.fp16",
    "rows.gpt2.fp32",
    "rows.llama.fp16",
    "certificate.dates.bf16",
    "certificate.tagging.fp16",
    "certificate.llama.bf16.int8-blocks",
)
# Seconds by kind, on a GPU beside 16 cores: of a part, and of each concurrency in it.
_SECONDS = {
    "machine": (20, 0),
    "rows": (30, 0),
    "certificate": (40, 0),
    "bench": (30, 5),
    "served": (25, 18),
    "speed": (10, 65),
}
_LARGE = 1.5  # times that of the others
# By kind; they are imported when they are asked for, as torch alone takes seconds.
FUNCTIONS = {
    "machine": ("machine", "look"),
    "rows": ("answers", "rows"),
    "certificate": ("answers", "certificate"),
    "bench": ("speed", "bench"),
    "served": ("served", "served"),
    "speed": ("speed", "speed"),
}


def choose(
    only: Sequence[str], *, slower: float = 1.0, concurrencies: Sequence[int] = (1, 32, 256)
) -> list[Part]:
    """Return the parts of these exact names, in their order; all for none. Else ValueError."""
    if unknown := [name for name in only if name not in _NAMES]:
        raise ValueError(f"no part is called {', '.join(unknown)}; known: {', '.join(_NAMES)}")
    found = []
    for name in only or _NAMES:
        kind, *of = pieces(name)
        fixed, each = _SECONDS[kind]
        seconds = slower * (fixed + each * len(concurrencies)) * (_LARGE if "-1b" in name else 1)
        found.append(Part(name, ".".join(of[:2]), seconds, limit=2 * seconds + 50))
    return found


def run(name: str, settings: Settings) -> Outcome:
    """Run a part in this process."""
    kind, *of = pieces(name)
    module, function = FUNCTIONS[kind]
    found = getattr(importlib.import_module(f"{__package__}.{module}"), function)(settings, *of)
    assert isinstance(found, Outcome)
    return found


def make(name: str, settings: Settings) -> Outcome:
    """Make a package in this process."""
    from loadtest.lab.gpu.models import make_package  # here, for torch alone takes seconds

    return Outcome(str(make_package(settings, name)), passed=True)


def pieces(name: str) -> list[str]:
    """Return the kind, the model, the format, and of `bench` how it is done."""
    found = name.split(".", 2)
    return [*found[:2], *found[2].partition(".")[::2]] if found[0] == "bench" else found
