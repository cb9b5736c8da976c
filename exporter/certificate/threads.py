"""Shows that a row decoded alone gives the same bits on any number of threads.

With more threads than a decoder has heads, onnxruntime may divide the keys of one long row among
them. `decoder_threads` keeps the engine from it; what it lets through is tried here.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.logits import StepLogits
from engine.slots.runner import SlotModelRunner
from engine.slots.threads import decoder_threads
from exporter.certificate.comparison import exported_graphs
from exporter.certificate.generation_cases import Case
from exporter.certificate.replay import Asked, Replay
from exporter.certificate.sides import MOST_TOP, Sides
from exporter.samples import SEED, random_tokens

_NUM_STEPS = 3


def certify_threads(sides: Sides, num_heads: int) -> list[int]:
    """Decode the end of the longest sequence on several numbers of threads; return which.

    One, two, and as many as the engine takes of one more than the decoder has heads. Raises
    CertificateError at the first difference that the comparison refuses.
    """
    case = _longest_case(sides)
    seen = sides.run_alone(case)
    tokens = tuple(seen.top_ids[-case.num_tokens :, 0].tolist())
    (eager,) = sides.eager([case], [tokens])
    sides.compare(seen, eager, case, "alone")
    tried = sorted({decoder_threads(sides.contract, wanted) for wanted in (1, 2, num_heads + 1)})
    for num_threads in tried:
        with exported_graphs():
            found = _decode_again(sides, case, tokens, num_threads)
        first = case.num_logits - len(found.logits)
        how = f"alone on {num_threads} threads with {num_heads} heads"
        sides.compare_bits(found, seen, eager, first, case, how)
    return tried


def _longest_case(sides: Sides) -> Case:
    contract = sides.contract
    rng = np.random.default_rng(SEED)
    start = () if contract.decoder_start_token_id is None else (contract.decoder_start_token_id,)
    limit = contract.cache.max_len
    prompt_length = max(1, limit + 1 - _NUM_STEPS)
    source = (
        random_tokens(rng, contract.vocab_size, contract.cross_cache.max_len)
        if contract.cross_cache
        else ()
    )
    prompt = (*start, *random_tokens(rng, contract.vocab_size, prompt_length - len(start)))
    return Case(source, prompt, limit - prompt_length + 1)


def _decode_again(sides: Sides, case: Case, tokens: tuple[int, ...], threads: int) -> StepLogits:
    """Decode a case that the runner for one has just run, from the end of its prompt on."""
    runner = sides.load(threads, 1)
    _copy_row(sides.alone, runner, case.num_computed(sides.chunk))
    replay = Replay(runner, [case], Asked(sides.chunk, MOST_TOP), [tokens])
    replay.decode()
    return replay.seen(0)


def _copy_row(source: SlotModelRunner, target: SlotModelRunner, length: int) -> None:
    one, other = source.cache, target.cache
    other.rows.write(0, one.rows.read(0, length))
    other.lengths[0] = length
    if one.sources is not None and other.sources is not None:
        source_length = int(one.source_lengths[0])
        other.sources.write(0, one.sources.read(0, source_length))
        other.source_lengths[0] = source_length
