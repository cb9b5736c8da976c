"""Shows that a row decoded alone gives the same bits on any number of threads.

With more threads than a decoder has heads, onnxruntime may divide the keys of one long row among
them. `decoder_threads` keeps the engine from it; what it lets through is tried here.
"""

from __future__ import annotations

import numpy as np

from engine.slots.threads import decoder_threads
from exporter.certificate.comparison import exported_graphs
from exporter.certificate.driver import Asked, generate
from exporter.certificate.generation_cases import Case, random_case
from exporter.certificate.sides import MOST_TOP, Sides
from exporter.samples import SEED

_NUM_STEPS = 3


def certify_threads(sides: Sides, num_heads: int) -> list[int]:
    """Compute the longest sequence on several numbers of threads; return which.

    One, two, and as many as the engine takes of one more than the decoder has heads. Raises
    CertificateError at the first difference that the comparison refuses.
    """
    case = _longest_case(sides)
    seen, tokens, eager = sides.check_alone(case)
    tried = sorted({decoder_threads(sides.contract, wanted) for wanted in (1, 2, num_heads + 1)})
    for num_threads in tried:
        with exported_graphs():
            runner = sides.load(num_threads, 1)
        (found,) = generate(runner, [case], Asked(sides.chunk, MOST_TOP), [tokens])
        how = f"alone on {num_threads} threads with {num_heads} heads"
        sides.compare_bits(found, seen, eager, 0, case, how)
    return tried


def _longest_case(sides: Sides) -> Case:
    contract = sides.contract
    limit = contract.cache.max_len
    prompt_length = max(1, limit + 1 - _NUM_STEPS)
    return random_case(
        np.random.default_rng(SEED),
        contract,
        source_length=contract.cross_cache.max_len if contract.cross_cache else 0,
        prompt_length=prompt_length,
        num_tokens=limit - prompt_length + 1,
        banned=sides.comparison.banned,
    )
