"""Shows on the threads and the processor that serve that a row's bits depend on no other row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.machine import l2_bytes
from engine.package.manifest import CacheShape, GenerationContract
from engine.slots.batch import ScheduledBatch
from engine.slots.memory import CacheMemory
from engine.slots.runner import SlotModelRunner

_NUM_ROWS = 32  # decoded together at most
_NUM_SOURCES = 8  # encoded together at most
_SHORT = 8  # tokens of a short row or source
_USUAL_L2 = 2**21  # bytes, where the system does not tell
_NOTHING = ScheduledBatch()

Bits = tuple[bytes, ...]


def rows_are_bit_equal(
    runner: SlotModelRunner, contract: GenerationContract, widest_group: int
) -> bool:
    """Return whether rows and sources give the same bits alone and among others.

    A row of random keys and values, longer than what the attention leaves to one thread as far as
    the model allows, is decoded alone, among rows as long and short ones, few and many, and as one
    of the sequences of its source, of which there may be `widest_group`. The cache is empty
    afterwards.
    """
    if runner.num_slots == 1:  # there are no others
        return True
    is_equal = _sources_are_equal(runner, contract) and _rows_are_equal(
        runner, contract, widest_group
    )
    runner.reset()
    return is_equal


def _sources_are_equal(runner: SlotModelRunner, contract: GenerationContract) -> bool:
    if contract.cross_cache is None:
        return True
    longest = contract.cross_cache.max_len
    for length, most in ((min(_SHORT, longest), _NUM_SOURCES), (longest, 2)):
        sources = [
            [(first + i) % contract.prompt_vocab_size for i in range(length)]
            for first in range(min(most, runner.num_slots))
        ]
        runner.encode(0, sources[0])
        alone = _bits_of_source(runner, length)
        runner.encode(0, *sources)
        if _bits_of_source(runner, length) != alone:
            return False
    return True


def _rows_are_equal(
    runner: SlotModelRunner, contract: GenerationContract, widest_group: int
) -> bool:
    length = _length(contract.cache)
    _fill_row(runner.cache.rows, contract.cache, length)
    num_beams = min(widest_group, runner.num_slots) if contract.cross_cache else 0
    batches = _batches(length, min(_NUM_ROWS, runner.num_slots), num_beams)
    alone, *among_others = (
        _decode(runner, contract.vocab_size, lengths, sources) for lengths, sources in batches
    )
    return all(bits == alone for bits in among_others)


def _batches(
    length: int, num_rows: int, num_beams: int
) -> Iterator[tuple[Sequence[int], tuple[int, ...]]]:
    """Yield lengths and sources of rows; the first row is the one that is looked at.

    A model without sources has no beams of one.
    """
    short = min(_SHORT, length)
    some_length = [length] + [i % (short + 1) for i in range(num_rows - 1)]
    for lengths in ([length], [length, short], [length, length], some_length):
        yield lengths, tuple(range(len(lengths))) if num_beams else ()
    if num_beams:
        yield [length] * num_beams, (0,) * num_beams


def _decode(
    runner: SlotModelRunner, vocab_size: int, lengths: Sequence[int], sources: tuple[int, ...]
) -> Bits:
    """Return all that a step gives for the first of rows that have these lengths."""
    runner.cache.lengths[: len(lengths)] = lengths
    ids = tuple(i % vocab_size for i in range(len(lengths)))
    step = runner.run(_NOTHING._replace(decode_ids=ids, decode_sources=sources, num_top=2))
    given = (step.logits, step.top_ids, step.top_logits, step.top_logprobs)
    return tuple(array[0].tobytes() for array in given)


def _length(cache: CacheShape) -> int:
    """Return a length at which the attention divides a row among threads, if it ever does.

    That begins at a length whose keys, counted as 32 bytes a number, fill the L2 cache.
    """
    block = (l2_bytes() or _USUAL_L2) // (32 * cache.head_dim)
    return min(2 * block, cache.max_len - 1)


def _fill_row(memory: CacheMemory, cache: CacheShape, length: int) -> None:
    """Put random keys and values into the first row, the same in every layer."""
    size = (cache.num_kv_heads, length, cache.head_dim)
    numbers = np.random.default_rng(0).standard_normal(size, np.float32)
    if cache.dtype == "int8":
        numbers = np.clip(numbers * 32, -127, 127)
    of_layer = np.stack((numbers, numbers[:, ::-1]))  # keys, values
    memory.write(0, np.broadcast_to(of_layer, (cache.num_layers, *of_layer.shape)))


def _bits_of_source(runner: SlotModelRunner, length: int) -> bytes:
    assert runner.cache.sources is not None
    return runner.cache.sources.read(0, length).tobytes()
