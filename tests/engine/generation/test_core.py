"""Whole steps on a scripted model: rows, groups and chunks put together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineFailure
from engine.generation.core import EngineCore
from engine.generation.engine_loop import EngineLoop
from engine.requests.request import SamplingParams
from engine.scheduling.output import EngineOutput, FailedOutput, FinishedOutput, TokensOutput
from engine.scheduling.sequence import Sequence, TokenRequest
from engine.slots.batch import ScheduledBatch
from engine.slots.cache import SlotKVCache

VOCAB_SIZE = 258


def continuation(source: list[int], tokens: list[int]) -> np.ndarray:
    """Logits that depend on everything in the row, so that a mixed-up row shows."""
    seed = hash((tuple(source), tuple(tokens))) % 2**32
    return np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32)


def request(key: int, length: int, **params) -> TokenRequest:
    """The first eight tokens are those of every other request of the same parity."""
    ids = tuple(((key % 2 if n < 8 else key) * 31 + n) % 256 for n in range(length))
    return TokenRequest(key, f"request-{key}", ids, SamplingParams(**params), key, 0.0)


def run(core: EngineCore, max_steps: int = 1000) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(max_steps):
        if not core.scheduler.has_work:
            return outputs
        outputs += core.step()
        core.check_integrity()
    raise AssertionError("the engine does not come to an end")


def sequences_of(outputs: list[EngineOutput]) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """Return the tokens of every sequence, each with the sum of log-probabilities up to it."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for output in outputs:
        if isinstance(output, TokensOutput):
            (token_id,) = output.token_ids
            told = found.setdefault((output.key, output.index), [])
            told.append((token_id, output.sum_logprob))
    return found


def test_what_a_step_brings_of_all_sequences_is_handed_over_at_once(make_core: Callable) -> None:
    core, _ = make_core(continuation)
    told: list[list[int]] = []  # keys of requests, by hand-over
    ended: list[int] = []

    def hand_over(outputs: list[EngineOutput]) -> bool:
        told.append([one.key for one in outputs if isinstance(one, TokensOutput)])
        ended.extend(one.key for one in outputs if isinstance(one, FinishedOutput))
        return len(ended) < 3

    loop = EngineLoop(core, "scripted", nullcontext(), hand_over)
    for key in range(3):
        loop.add(request(key, 5, max_new_tokens=6, ignore_eos=True))
    loop.run()

    assert sorted(ended) == [0, 1, 2]
    assert [sorted(keys) for keys in told if keys] == [[0, 1, 2]] * 6


@pytest.mark.parametrize("overlaps", [False, True])
def test_sequences_that_decode_on_are_not_looked_at_one_by_one(
    overlaps: bool, make_core: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = make_core(continuation)
    core.runner.overlaps = overlaps
    for key in range(4):
        core.scheduler.add(request(key, 5, max_new_tokens=20, ignore_eos=True))
    for _ in range(4):
        core.step()
    looked_at: list[Sequence] = []
    grow = SlotKVCache.grow

    def noted(self: SlotKVCache, sequence: Sequence, num_tokens: int) -> bool:
        looked_at.append(sequence)
        return grow(self, sequence, num_tokens)

    monkeypatch.setattr(SlotKVCache, "grow", noted)

    told = [output.key for _ in range(8) for output in core.step()]

    assert sorted(told) == sorted([0, 1, 2, 3] * 8)
    assert not looked_at


requests_strategy = st.lists(
    st.builds(
        lambda length, new, outputs, greedy, minimum: {
            "length": length,
            "max_new_tokens": new,
            "min_new_tokens": min(new, minimum),
            "num_outputs": 1 if greedy else outputs,
            "strategy": "greedy" if greedy else "sampling",
        },
        st.integers(1, 17),
        st.integers(1, 9),
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("reuse", [True, False], ids=["with reuse", "without reuse"])
@pytest.mark.parametrize("shape", [{}, {"max_source_len": 20}], ids=["decoder", "encoder-decoder"])
def test_every_request_gets_what_it_gets_alone_whatever_runs_with_it(
    make_core: Callable, shape: dict[str, int], reuse: bool
) -> None:
    config = EngineConfig(
        max_num_seqs=4, prefill_chunk_size=4, max_num_batched_tokens=9, reuse_prefixes=reuse
    )

    @settings(max_examples=60)
    @given(requests_strategy, st.data())
    def check(described: list[dict], data: st.DataObject) -> None:
        sources = [request(key, **options) for key, options in enumerate(described)]
        alone = {}
        for source in sources:
            core, _ = make_core(continuation, config=config, **shape)
            core.scheduler.add(source)
            alone |= sequences_of(run(core))

        core, runner = make_core(continuation, config=config, **shape)
        outputs = []
        for source in sources:
            core.scheduler.add(source)
            for _ in range(data.draw(st.integers(0, 4))):
                outputs += core.step()
        outputs += run(core)

        assert sequences_of(outputs) == alone
        assert {o.key for o in outputs if isinstance(o, FinishedOutput)} == set(range(len(sources)))
        prompts = [list(source.prompt_ids) for source in sources]
        if reuse:
            assert all(any(p[: len(row)] == row for p in prompts) for row in runner.rows if row)
            assert all(source in prompts for source in runner.sources if source)
        else:
            assert runner.rows == [[]] * 4 and runner.sources == [[]] * 4

    check()


def test_aborts_leave_the_others_as_they_are(make_core: Callable) -> None:
    @settings(max_examples=60)
    @given(requests_strategy, st.data())
    def check(described: list[dict], data: st.DataObject) -> None:
        core, runner = make_core(continuation)
        expected, outputs = {}, []
        for key, options in enumerate(described):
            core.scheduler.add(request(key, **options))
            lonely, _ = make_core(continuation)
            lonely.scheduler.add(request(key, **options))
            expected |= sequences_of(run(lonely))

        while core.scheduler.has_work:
            outputs += core.step()
            key = data.draw(st.integers(0, len(described) - 1))
            if data.draw(st.booleans()):
                core.scheduler.abort(key)

        for name, tokens in sequences_of(outputs).items():
            assert tokens == expected[name][: len(tokens)]
        assert all(len(row) % 128 == 0 for row in runner.rows), "more than a beginning was kept"
        assert core.scheduler.load().running == 0

    check()


def test_after_a_failed_step_every_request_has_failed_and_the_next_one_runs(
    make_core: Callable,
) -> None:
    core, runner = make_core(continuation)
    for key in (1, 2):
        core.scheduler.add(request(key, 3, max_new_tokens=5))
    core.step()

    def fail() -> None:
        raise RuntimeError("out of memory")

    runner.before_step = fail
    with pytest.raises(RuntimeError):
        core.step()
    outputs = core.recover(lambda request_id: EngineFailure(request_id))
    runner.before_step = lambda: None
    core.scheduler.add(request(3, 3, max_new_tokens=5))

    assert [o.key for o in outputs if isinstance(o, FailedOutput)] == [1, 2]
    assert len(sequences_of(run(core))[3, 0]) == 5


def tokens_in(batch: ScheduledBatch) -> tuple[int, int]:
    """Return how many tokens a step decodes, and how many it reads."""
    read = sum(len(chunk.token_ids) for chunk in batch.chunks)
    return len(batch.decode_ids), read + sum(len(encode.source_ids) for encode in batch.encodes)


def test_a_long_prompt_costs_running_streams_one_chunk_a_step(make_core: Callable) -> None:
    """So that the worst gap between their tokens is one decode step and one chunk."""
    core, runner = make_core(continuation, config=EngineConfig(), max_len=1024)
    for key in range(8):
        core.scheduler.add(request(key, 4, max_new_tokens=40, ignore_eos=True))
    core.step()

    core.scheduler.add(request(99, 512, max_new_tokens=3, ignore_eos=True))
    outputs = [core.step() for _ in range(6)]

    steps = [tokens_in(batch) for batch in runner.batches[1:]]
    assert steps == [(8, 128)] * 4 + [(9, 0)] * 2
    for tokens in outputs:
        assert {o.key for o in tokens if isinstance(o, TokensOutput)} >= set(range(8))


def test_two_long_prompts_do_not_take_two_chunks_of_a_step(make_core: Callable) -> None:
    core, runner = make_core(continuation, config=EngineConfig(), max_len=1024)
    for key in range(3):
        core.scheduler.add(request(key, 4, max_new_tokens=40, ignore_eos=True))
    core.step()
    for key in (10, 11):
        core.scheduler.add(request(key, 200, max_new_tokens=3, ignore_eos=True))

    for _ in range(5):
        core.step()

    assert [tokens_in(batch)[1] for batch in runner.batches[1:]] == [128, 72, 128, 72, 0]


def test_more_prompts_than_streams_take_the_whole_step(make_core: Callable) -> None:
    core, runner = make_core(
        continuation, config=EngineConfig(max_num_batched_tokens=512), max_len=1024
    )
    core.scheduler.add(request(1, 4, max_new_tokens=40, ignore_eos=True))
    core.step()
    for key in range(10, 16):
        core.scheduler.add(request(key, 120, max_new_tokens=3, ignore_eos=True))

    core.step()
    core.step()

    assert [tokens_in(batch) for batch in runner.batches[1:]] == [(1, 480), (5, 120)]


def test_sources_are_bounded_like_prompts_but_a_longer_one_runs_at_once(
    make_core: Callable,
) -> None:
    core, runner = make_core(
        continuation, config=EngineConfig(prefill_chunk_size=32), max_source_len=200
    )
    for key in range(4):
        core.scheduler.add(request(key, 4, max_new_tokens=40, ignore_eos=True))
    core.step()
    for key, length in ((10, 100), (11, 20), (12, 10), (13, 2)):
        core.scheduler.add(request(key, length, max_new_tokens=9, ignore_eos=True))

    core.step()
    core.step()

    assert [tokens_in(batch) for batch in runner.batches[1:]] == [(5, 100), (7, 30)]


def test_rows_that_the_runner_pads_are_counted_as_wasted(make_core: Callable) -> None:
    core, runner = make_core(continuation)
    core.scheduler.add(request(1, 3, max_new_tokens=4, ignore_eos=True))

    def pad() -> None:
        runner.num_padding += 2

    runner.before_step = pad
    core.step()
    core.step()

    assert core.scheduler.load().wasted.padding_tokens == 4


def test_what_does_not_fit_together_is_named(make_core: Callable) -> None:
    core, runner = make_core(continuation)
    core.scheduler.add(request(1, 6, max_new_tokens=9))
    core.step()
    core.check_integrity()

    runner.rows[0].append(1)
    with pytest.raises(EngineFailure, match=r"memory holds .*\(7, 0, 0, 0\).* should hold .*\(6,"):
        core.check_integrity()
    core.scheduler._num_sequences += 1
    with pytest.raises(EngineFailure, match="1 sequences run, and 2 are counted; memory"):
        core.check_integrity()


def test_a_source_row_that_nobody_gives_back_is_named(make_core: Callable) -> None:
    core, _ = make_core(continuation, max_source_len=30)
    core.scheduler.add(request(1, 6, max_new_tokens=9))
    core.check_integrity()

    core.scheduler._cache._sources.take(("", (1, 2)))  # nothing was encoded into it yet

    with pytest.raises(EngineFailure, match="2 rows have sources, and 1 should"):
        core.check_integrity()
