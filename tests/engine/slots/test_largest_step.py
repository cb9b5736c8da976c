"""How long the largest step takes is told from its pieces, by a scripted clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import PackageError
from engine.sampling.logits import StepLogits
from engine.sampling.plain import SamplingInputs
from engine.slots.batch import ScheduledBatch
from engine.slots.largest_step import largest_step_seconds
from engine.slots.runner import SlotModelRunner
from tests.engine.slots.test_model_runner import TinyModel

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=96, prefill_chunk_size=8)


class Timed:
    """Runs a model on a clock of its own: so many seconds a token of a source or a prompt."""

    def __init__(self, runner: SlotModelRunner, *, encode: float = 0, prefill: float = 0) -> None:
        self.runner, self.encode, self.prefill = runner, encode, prefill
        self.now = 0.0
        self.stall = 0.0  # seconds more that the first step takes
        self.sizes: list[tuple[int, int]] = []  # tokens of sources and prompts, a step
        self.read_sources: list[int] = []  # how long that of each chunk is

    def run(self, batch: ScheduledBatch, draws: SamplingInputs | None = None) -> StepLogits:
        sources = sum(len(encode.source_ids) for encode in batch.encodes)
        prompts = sum(len(chunk.token_ids) for chunk in batch.chunks)
        self.sizes.append((sources, prompts))
        lengths = self.runner.cache.source_lengths.tolist()
        self.read_sources += [lengths[chunk.source_row] for chunk in batch.chunks]
        self.now += sources * self.encode + prompts * self.prefill + self.stall
        self.stall = 0.0
        return self.runner.run(batch, draws)

    def reset(self) -> None:
        self.runner.reset()

    def clock(self) -> float:
        return self.now


def _seconds(model: TinyModel, timed: Timed, config: EngineConfig = CONFIG) -> float:
    return largest_step_seconds(timed, model.contract, config, "package", clock=timed.clock)


def _load(model: TinyModel, directory: Path) -> SlotModelRunner:
    return SlotModelRunner.load(model.contract, *model.write(directory), num_slots=2, num_threads=1)


def test_a_step_full_of_prompts_takes_as_many_chunks_as_fit(tmp_path: Path) -> None:
    model = TinyModel(1, has_encoder=False)
    timed = Timed(_load(model, tmp_path), prefill=0.125)

    assert _seconds(model, timed) == 96 * 0.125
    assert timed.sizes == [(0, 8)] * 2
    assert not timed.runner.cache.lengths.any()


def test_a_moment_in_which_others_have_the_cores_does_not_make_a_step_look_long(
    tmp_path: Path,
) -> None:
    model = TinyModel(1, has_encoder=False)
    timed = Timed(_load(model, tmp_path), prefill=0.125)
    timed.stall = 5.0

    assert _seconds(model, timed) == 96 * 0.125


def test_a_chunk_is_no_longer_than_a_row(tmp_path: Path) -> None:
    model = TinyModel(1, has_encoder=False)
    timed = Timed(_load(model, tmp_path), prefill=0.125)
    longest = model.contract.cache.max_len

    _seconds(model, timed, replace(CONFIG, prefill_chunk_size=longest + 5))

    assert timed.sizes == [(0, longest)] * 2


@pytest.mark.parametrize(("encode", "prefill"), [(0.5, 0.125), (0.0, 0.125)])
def test_a_step_full_of_sources_counts_where_it_is_the_longer_one(
    tmp_path: Path, encode: float, prefill: float
) -> None:
    model = TinyModel(1, has_encoder=True)
    timed = Timed(_load(model, tmp_path), encode=encode, prefill=prefill)
    longest = model.contract.cross_cache.max_len
    num_sources = -(-96 // longest)

    assert _seconds(model, timed) == max(num_sources * longest * encode, 96 * prefill)
    assert timed.sizes == [(longest, 0), (0, 8)] * 2
    assert timed.read_sources == [longest] * 2
    assert not timed.runner.cache.source_lengths.any()


def test_a_model_that_fails_at_a_whole_chunk_is_refused(tmp_path: Path) -> None:
    model = TinyModel(1, has_encoder=False)
    timed = Timed(_load(model, tmp_path))

    def fail(batch: ScheduledBatch, draws: SamplingInputs | None = None) -> StepLogits:
        raise RuntimeError("no such length")

    timed.run = fail

    with pytest.raises(PackageError, match="package: a chunk of 8 tokens failed: no such length"):
        _seconds(model, timed)
