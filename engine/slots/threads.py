"""How many threads a decoder runs on."""

from __future__ import annotations

from engine.machine import num_cores
from engine.package.manifest import GenerationContract


def decoder_threads(contract: GenerationContract, num_threads: int = 0) -> int:
    """Return on how many of `num_threads` threads (0: one a core) a decoder runs.

    It has no more than it has query heads. If there are more threads than heads and rows together,
    onnxruntime's attention divides the keys of a long row (head_dim 64: from 512 to 2,048 positions
    on, by the processor's L2 cache) among threads and adds up the parts: the sum then depends on
    how many rows run and how long they are.
    """
    return min(num_threads or num_cores(), contract.num_heads)
