"""The parts of the check in the order in which they are worth most on the first day with a GPU.

Nothing of ours has run on one. First comes what is least certain and decides most: that anything
computes, that rows are right and bit-equal, that certificates hold; then a few times.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from loadtest.lab.gpu.part import Outcome, Part, Settings

# Name, "kind.model.format", and seconds that it is expected to take on a GPU beside 16 cores.
_SECONDS: tuple[tuple[str, float], ...] = (
    ("machine", 20),
    ("rows.gpt2.fp16", 20),
    ("rows.llama.bf16", 20),
    ("rows.marian.fp16", 20),
    ("certificate.gpt2.fp16", 25),
    ("certificate.dates.fp16", 25),
    ("certificate.llama.bf16", 25),
    ("bench.gpt2-124m.fp16", 40),
    ("served.gpt2-124m.fp16", 80),
    ("speed.gpt2-124m.fp16", 90),
    ("certificate.marian.fp16", 25),
    ("certificate.gpt2.fp16.int4", 25),
    ("certificate.llama.fp16.kv-int8", 25),
    ("certificate.digits.fp16", 20),
    # in a second call, mostly
    ("bench.llama-1b.bf16", 60),
    ("bench.marian-base.fp16", 45),
    ("bench.gpt2-124m.fp16.one-bucket", 40),
    ("bench.gpt2-124m.fp16.topk", 40),
    ("speed.llama-1b.bf16", 120),
    ("speed.marian-base.fp16", 100),
    ("rows.gpt2.fp32", 20),
    ("rows.llama.fp16", 20),
    ("certificate.dates.bf16", 25),
    ("certificate.tagging.fp16", 20),
    ("certificate.llama.bf16.int8-blocks", 25),
)


# By kind; they are imported when they are asked for, as torch alone takes seconds.
_FUNCTIONS = {
    "machine": ("machine", "look"),
    "rows": ("answers", "rows"),
    "certificate": ("answers", "certificate"),
    "bench": ("speed", "bench"),
    "served": ("served", "served"),
    "speed": ("speed", "speed"),
}


def choose(only: Sequence[str], slower: float = 1.0) -> list[Part]:
    """Return the parts of these exact names, in their order; all for none. Else ValueError."""
    known = dict(_SECONDS)
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"no part is called {', '.join(unknown)}; known: {', '.join(known)}")
    return [_part(name, known[name] * slower) for name in only or known]


def run(name: str, settings: Settings) -> Outcome:
    """Run a part in this process."""
    kind, *of = _pieces(name)
    module, function = _FUNCTIONS[kind]
    found = getattr(importlib.import_module(f"{__package__}.{module}"), function)(settings, *of)
    assert isinstance(found, Outcome)
    return found


def _part(name: str, seconds: float) -> Part:
    _, *of = _pieces(name)
    return Part(name, ".".join(of[:2]), seconds, limit=2 * seconds + 50)


def _pieces(name: str) -> list[str]:
    """Return the kind, the model, the format, and of `bench` how it is done."""
    pieces = name.split(".", 2)
    return [*pieces[:2], *pieces[2].partition(".")[::2]] if pieces[0] == "bench" else pieces
