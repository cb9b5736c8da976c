"""Steps drawn at random give the same bits with decode calls of a fixed number of rows as without.

Rows are prefilled, copied, exchanged and cut while others decode; some are full.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.package.package import load_package
from engine.sampling.logits import StepLogits
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from tests.parity.conftest import CPU, CUDA_FP16, VOCAB_SIZE, Exported, Setup

SLOTS, STEPS = 6, 150
NOTHING = ScheduledBatch()


class RandomSteps:
    """Draws steps that a scheduler might make, knowing what every row holds."""

    def __init__(self, seed: int, max_len: int, max_source: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._max_len, self._max_source = max_len, max_source
        self._lengths, self._sources = [0] * SLOTS, [0] * SLOTS

    def draw(self) -> ScheduledBatch:
        ops = tuple(self._op() for _ in range(self._count(0, 2)))
        encodes = self._encodes() if self._max_source else ()
        decoding = self._decoding()
        chunk = self._chunk(decoding)
        step = NOTHING._replace(
            row_ops=ops,
            encodes=encodes,
            chunks=() if chunk is None else (chunk,),
            decode_ids=self._ids(decoding),
            decode_sources=tuple(self._encoded() for _ in range(decoding))
            if self._max_source
            else (),
            num_top=int(self._rng.choice([1, 1, 3])),
        )
        num_logits = decoding + (chunk.num_logits if chunk else 0)
        if self._max_source and num_logits and self._rng.random() < 0.3:
            step = step._replace(aligned=(num_logits - 1,))
        return step

    def _op(self) -> RowOp:
        kind = self._rng.choice(["copy", "swap", "cut", "clear"])
        source, target = self._rng.permutation(SLOTS)[:2].tolist()
        lengths = self._lengths
        if kind == "copy":
            stop = self._count(0, lengths[source])
            lengths[target] = stop
            return RowOp("copy", source, target, 0, stop)
        if kind == "swap":
            lengths[source], lengths[target] = lengths[target], lengths[source]
            return RowOp("swap", source, target)
        lengths[target] = self._count(0, lengths[target])
        return RowOp("cut" if kind == "cut" else "clear", target, target, lengths[target])

    def _encodes(self) -> tuple[Encode, ...]:
        empty = [row for row, length in enumerate(self._sources) if not length]
        chosen = [row for row in empty if row == 0 or self._rng.random() < 0.3]
        found = []
        for row in chosen:
            self._sources[row] = self._count(1, self._max_source)
            found.append(Encode(row, self._ids(self._sources[row])))
        return tuple(found)

    def _decoding(self) -> int:
        able = 0
        while able < SLOTS and 0 < self._lengths[able] < self._max_len:
            able += 1
        decoding = self._count(0, able)
        for row in range(decoding):
            self._lengths[row] += 1
        return decoding

    def _chunk(self, first: int) -> PrefillChunk | None:
        if first == SLOTS or self._rng.random() < 0.3:
            return None
        row = self._count(first, SLOTS - 1)
        room = self._max_len - self._lengths[row]
        if not room:
            return None
        size = room if self._rng.random() < 0.2 else self._count(1, min(room, 7))
        self._lengths[row] += size
        source = self._encoded() if self._max_source else 0
        return PrefillChunk(row, self._ids(size), self._count(0, min(size, 3)), source)

    def _encoded(self) -> int:
        return int(self._rng.choice([row for row, length in enumerate(self._sources) if length]))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, VOCAB_SIZE, count).tolist())

    def _count(self, least: int, most: int) -> int:
        return int(self._rng.integers(least, most + 1))


@pytest.mark.parametrize(
    ("name", "setup"),
    [("gpt", CPU), ("encoder-decoder", CPU), ("llama", CUDA_FP16)],
    ids=["gpt-cpu", "encoder-decoder-cpu", "llama-cuda-fp16"],
)
@pytest.mark.parametrize("buckets", [(SLOTS,), (1, 4, SLOTS)], ids=["one", "several"])
def test_a_fixed_number_of_rows_changes_no_bit(
    name: str, setup: Setup, buckets: tuple[int, ...], exported: Callable[..., Exported]
) -> None:
    package = load_package(exported(name, setup.form).package)
    contract = package.manifest.generation
    assert contract is not None
    encoder = package.file("encoder.onnx") if contract.cross_cache else None

    def load(buckets: tuple[int, ...]) -> SlotModelRunner:
        return SlotModelRunner.load(
            contract,
            package.file("decoder.onnx"),
            encoder,
            num_slots=SLOTS,
            num_threads=1,
            buckets=buckets,
        )

    plain, fixed = load(()), load(buckets)
    longest = contract.cross_cache.max_len if contract.cross_cache else 0
    steps = RandomSteps(len(buckets), contract.cache.max_len, longest)

    for _ in range(STEPS):
        step = steps.draw()
        assert bits(fixed.run(step)) == bits(plain.run(step)), step
        np.testing.assert_array_equal(fixed.cache.lengths, plain.cache.lengths)


def bits(given: StepLogits) -> list[bytes]:
    arrays = [given.all_logits, given.top_ids, given.top_logits, given.top_logprobs]
    if given.alignment is not None:
        arrays.append(given.alignment)
    return [np.asarray(array).tobytes() for array in arrays]
